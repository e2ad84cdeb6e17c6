# SPDX-License-Identifier: Apache-2.0
"""The shipped variants against their definitions in float64, on the CPU."""

from __future__ import annotations

import pytest
from variant_cases import ORACLES, VariantBatch, arguments, check_variant

MIXED = VariantBatch()
BATCHES = {
    "mixed": MIXED,
    "split": VariantBatch(split=True, heads=(6, 2), seed=1),
    "decode": VariantBatch(q_lens=(1, 1, 1), kv_lens=(1, 513, 130), heads=(8, 1), seed=2),
    "prefill": VariantBatch(q_lens=(70, 0, 9), kv_lens=(70, 5, 90), heads=(3, 3), page_size=5, seed=3),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ORACLES)
def test_float32(name: str, batch: VariantBatch) -> None:
    check_variant(name, ORACLES[name], arguments(name, batch), batch)
