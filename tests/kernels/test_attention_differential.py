# SPDX-License-Identifier: Apache-2.0
"""BatchAttention on the CPU against the oracle, over random batches of every option and layout.

Each pair of dtypes is one native module; the pairs below reach every query dtype and every cache dtype.
"""

from __future__ import annotations

import pytest
from attention_batch import Batch, check
from attention_strategies import batches
from examples import share
from hypothesis import given

PAIRS = [
    ("float32", "float32", 150),
    ("bfloat16", "bfloat16", 80),
    ("float16", "float16", 60),
    ("bfloat16", "float8_e4m3fn", 60),
    ("float16", "float8_e5m2", 40),
    ("float32", "float8_e4m3fn", 40),
    ("float32", "float8_e5m2", 40),
    ("bfloat16", "float16", 20),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "count"), PAIRS, ids=[f"{q}-{kv}" for q, kv, _ in PAIRS])
def test_any_batch_equals_the_oracle(dtype: str, kv_dtype: str, count: int) -> None:
    @share(count)
    @given(batches(dtype, kv_dtype))
    def run(batch: Batch) -> None:
        check(batch)

    run()
