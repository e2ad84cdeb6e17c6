# SPDX-License-Identifier: Apache-2.0
"""AttentionSpec: defaults, normalised dtypes, and an error that names the field for every bad value."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from fi_backend.core.spec import FLOAT_DTYPES, FP8_DTYPES, AttentionSpec
from fi_backend.core.support import unsupported_reason
from fi_backend.errors import UnsupportedError


def test_defaults_follow_from_the_head() -> None:
    spec = AttentionSpec(32, 8, 128)
    assert (spec.head_dim_v, spec.group_size, spec.kv_dtype, spec.dtype) == (128, 4, "bfloat16", "bfloat16")
    assert spec.scale == 1 / math.sqrt(128)
    assert (spec.causal, spec.window_left, spec.logits_soft_cap) == (True, -1, 0.0)
    assert AttentionSpec(1, 1, 64, scale=0.5, head_dim_v=16).scale == 0.5


def test_is_a_frozen_value() -> None:
    spec = AttentionSpec(4, 2, 64, dtype=torch.float16)  # type: ignore[arg-type]
    assert spec == AttentionSpec(4, 2, 64, dtype="float16")
    assert hash(spec) == hash(AttentionSpec(4, 2, 64, dtype="float16"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.head_dim = 1  # type: ignore[misc]
    assert dataclasses.replace(spec, window_left=5).window_left == 5


@pytest.mark.parametrize("name", FLOAT_DTYPES)
@pytest.mark.parametrize("kv_name", [*FLOAT_DTYPES, *FP8_DTYPES])
def test_dtypes_are_names_or_torch_dtypes(name: str, kv_name: str) -> None:
    by_name = AttentionSpec(1, 1, 64, dtype=name, kv_dtype=kv_name)
    by_dtype = AttentionSpec(1, 1, 64, dtype=getattr(torch, name), kv_dtype=getattr(torch, kv_name))
    assert by_name == by_dtype
    assert (by_name.dtype, by_name.kv_dtype) == (name, kv_name)


@pytest.mark.parametrize("dim", [1, 20, 40, 72, 80, 96, 112, 511, 512])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (64, 1), (48, 8), (70, 10)])
def test_any_head_dim_and_group(dim: int, heads: tuple[int, int]) -> None:
    spec = AttentionSpec(*heads, dim, head_dim_v=513 - dim)
    assert spec.group_size * heads[1] == heads[0]
    assert unsupported_reason(spec, "cpu") is None


BAD = {
    "num_qo_heads": [
        *((0, ValueError), (-4, ValueError), (3, ValueError), (2**31, ValueError)),
        *((4.0, TypeError), (True, TypeError)),
    ],
    "num_kv_heads": [(0, ValueError), ("2", TypeError), (3, ValueError)],
    "head_dim": [(0, ValueError), (513, ValueError), (64.0, TypeError), (None, TypeError)],
    "head_dim_v": [(-1, ValueError), (513, ValueError), (1.5, TypeError)],
    "page_size": [
        *((0, ValueError), (-16, ValueError), (2**31, ValueError), (16.0, TypeError), (True, TypeError))
    ],
    "dtype": [("float8_e4m3fn", UnsupportedError), ("int8", TypeError), ("half", TypeError), (3, TypeError)],
    "kv_dtype": [("uint8", TypeError), (np.float64, TypeError)],
    "scale": [(math.nan, ValueError), (math.inf, ValueError), ("1", TypeError), (True, TypeError)],
    # 2**32 + 5 would be a window of 5 in 32 bits.
    "window_left": [
        *((-2, ValueError), (2**31, ValueError), (2**32 + 5, ValueError)),
        *((1.0, TypeError), (None, TypeError), (False, TypeError)),
    ],
    "logits_soft_cap": [(-1.0, ValueError), (math.nan, ValueError), (None, TypeError), (True, TypeError)],
    "causal": [(1, TypeError), ("yes", TypeError), (None, TypeError)],
    "alibi": [(0, TypeError)],
    "sinks": [(torch.ones(4), TypeError)],
    "custom_mask": [("none", TypeError)],
    "batch_invariant": [(1, TypeError)],
}


@pytest.mark.parametrize(("field", "value", "kind"), [(f, v, k) for f, bad in BAD.items() for v, k in bad])
def test_bad_values_are_named(field: str, value: Any, kind: type[Exception]) -> None:
    good: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    named = {"num_kv_heads": "num_(qo|kv)_heads", "kv_dtype": "dtype"}.get(field, field)
    with pytest.raises(kind, match=rf"^{named}: .*got ") as error:
        AttentionSpec(**good | {field: value})
    shown = "4" if field == "num_kv_heads" and value == 3 else str(value)[:8]
    assert shown in str(error.value)


def test_query_of_support_says_why_and_never_raises() -> None:
    reason = unsupported_reason(AttentionSpec(1, 1, 64), "meta")
    assert reason is not None
    assert reason.startswith("device: ")
    assert "'meta'" in reason
