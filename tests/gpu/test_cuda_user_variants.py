# SPDX-License-Identifier: Apache-2.0
"""The shipped variants, and one with raw PTX and a header of its own, against float64 on a GPU."""

from __future__ import annotations

import pytest
import torch
from variant_cases import ORACLES, Oracle, VariantBatch, arguments, check_variant, logits

from fi_backend import AttentionVariant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PTX = AttentionVariant(
    name="squashed",
    params={"sharpness": "float32"},
    headers={
        "squash.h": """
            #pragma once
            FI_DEVICE float squash(float x) {
            #if defined(__CUDA_ARCH__)
              float y;
              asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
              return y;
            #else
              return std::tanh(x);
            #endif
            }
        """
    },
    logits_transform="return params.sharpness * squash(logit);",
)
SQUASHED = Oracle(logits=lambda r, a: a["sharpness"] * torch.tanh(logits(r)))
BATCHES = {
    "mixed": VariantBatch(device="cuda", dtype="bfloat16", heads=(8, 2), kv_lens=(700, 64, 100, 9000)),
    "fp8": VariantBatch(
        device="cuda", dtype="bfloat16", kv_dtype="float8_e4m3fn", heads=(8, 2), k_scale=0.5, seed=1
    ),
    "prefill": VariantBatch(
        device="cuda", dtype="float16", q_lens=(300, 7), kv_lens=(300, 900), head_dim=128, seed=2
    ),
    "split": VariantBatch(
        device="cuda", dtype="bfloat16", q_lens=(1, 1), kv_lens=(9000, 33), heads=(4, 1), seed=3
    ),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ORACLES)
def test_a_shipped_variant(name: str, batch: VariantBatch) -> None:
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


def test_raw_ptx_and_a_header_of_the_user() -> None:
    check_variant(PTX, SQUASHED, {"sharpness": 2.0}, BATCHES["mixed"])


@pytest.mark.parametrize("name", ["soft_cap", "output_scale"])
def test_what_depends_on_no_position_shares_prefixes(name: str) -> None:
    batch = VariantBatch(
        device="cuda",
        dtype="bfloat16",
        q_lens=(1, 1, 1),
        kv_lens=(600, 700, 900),
        shared_pages=32,
        split=True,
    )
    attention = check_variant(name, ORACLES[name], arguments(name, batch), batch)
    assert attention.planner.sharing is not None
    assert attention.tally is not None
