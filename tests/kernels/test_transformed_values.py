# SPDX-License-Identifier: Apache-2.0
"""Values that a variant transforms, on the CPU: what the functor is given, and what it must not spoil."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mixed_values import check_mixed_values
from variant_cases import ORACLES, Oracle, VariantBatch, arguments, check_shared_prefix, check_variant

BATCHES = {
    "mixed": VariantBatch(),
    "decode": VariantBatch(q_lens=(1, 1, 1), kv_lens=(1, 513, 130), heads=(8, 1), seed=1),
    "prefill": VariantBatch(q_lens=(70, 0, 9), kv_lens=(70, 5, 90), heads=(3, 3), page_size=5, seed=2),
    "uneven widths": VariantBatch(options={"head_dim_v": 41}, split=True, seed=3),
    "window": VariantBatch(options={"window_left": 37}, split=True, seed=4),
    "batch-invariant": VariantBatch(options={"batch_invariant": True}, kv_lens=(2000, 64, 1100, 700), seed=5),
}
FP8 = VariantBatch(dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale=0.25, v_scale=0.5, split=True, seed=6)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_body_for_single_values(batch: VariantBatch) -> None:
    check_mixed_values(replace(batch, v_scale=0.5))


def test_fp8_caches() -> None:
    """Values come dequantised, and nothing applies their scale again."""
    check_mixed_values(FP8)


def test_a_spoilt_value_reaches_those_who_see_its_key() -> None:
    """0 * NaN is NaN, of what a functor returns too."""
    check_mixed_values(replace(BATCHES["prefill"], seed=7), spoilt=33)


def shipped(batch: VariantBatch) -> tuple[Oracle, dict[str, Any]]:
    return ORACLES["channel_scales"], arguments("channel_scales", batch)


def test_a_body_for_vectors_of_values() -> None:
    batch = VariantBatch(v_scale=0.25, split=True, options={"batch_invariant": True}, seed=8)
    check_variant("channel_scales", *shipped(batch), batch)


def test_offsets_may_be_left_out() -> None:
    batch = BATCHES["mixed"]
    oracle, args = shipped(batch)
    without = {**args, "value_offset": torch.zeros_like(args.pop("value_offset"))}
    check_variant(
        "channel_scales", replace(oracle, values=lambda r, _: oracle.values(r, without)), args, batch
    )


def test_requests_with_a_prefix_read_it_together() -> None:
    check_shared_prefix("channel_scales", VariantBatch(heads=(8, 2), v_scale=0.5))
