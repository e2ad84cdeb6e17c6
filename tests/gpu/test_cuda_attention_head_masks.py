# SPDX-License-Identifier: Apache-2.0
"""Masks of each head on CUDA: copied from the host, and packed on the device."""

from __future__ import annotations

import pytest
import torch
from gpu_device import device
from head_masks import HKV, HQ, KV_LENS, QO_INDPTR, HeadMaskStep, int32

from fi_backend.core.mask_buffer import MaskBuffer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]


@pytest.mark.parametrize("heads", [1, HKV, HQ])
def test_masks_from_the_host(heads: int) -> None:
    step = HeadMaskStep(heads, dtype="bfloat16", head_dim=128, device=device())
    step.check(step.masks)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("heads", [HKV, HQ])
def test_masks_packed_on_the_device(heads: int, tree: bool) -> None:
    step = HeadMaskStep(heads, tree=tree, dtype="bfloat16", head_dim=128, device=device())
    held = MaskBuffer(max_requests=6, max_q_len=25, max_kv_len=130, device=device(), num_heads=heads)
    parts = [m[..., m.shape[2] - m.shape[0] :] if tree else m for m in step.masks]
    flat = torch.cat([part.reshape(-1) for part in parts]).to(device())
    step.check(held.pack(flat, QO_INDPTR.to(device()), int32(KV_LENS).to(device()), tree=tree))
