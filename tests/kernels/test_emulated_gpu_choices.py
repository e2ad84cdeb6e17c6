# SPDX-License-Identifier: Apache-2.0
"""Masks of each head and chosen pages on the emulated GPU, in modules of test_emulated_gpu.py."""

from __future__ import annotations

import emulator_modules
import pytest
import torch
from head_masks import HKV, HQ, HeadMaskStep
from numeric import assert_close
from oracle import attention
from quest_batch import QuestBatch

from fi_backend import AttentionSpec, BlockSparseAttention
from fi_backend.core import kernels
from fi_backend.core.block_selection import BlockSelection


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over CPU tensors runs the kernels for sm_90a."""
    monkeypatch.setattr(kernels, "_ready", set())
    emulator_modules.install("sm_90a", monkeypatch.setattr)


@pytest.mark.parametrize("heads", [1, HKV, HQ])
def test_a_mask_for_each_head(heads: int) -> None:
    step = HeadMaskStep(heads, dtype="bfloat16", head_dim=64, logits_soft_cap=20.0)
    step.check(step.masks)


def test_pages_chosen_by_each_kv_head() -> None:
    batch = QuestBatch(4, dtype="bfloat16", head_dim=64)
    batch.append()
    batch.compare(*batch.run())


def blocks(num_heads: int) -> tuple[BlockSparseAttention, torch.Tensor, tuple[torch.Tensor, ...]]:
    random = torch.Generator().manual_seed(num_heads)
    spec = AttentionSpec(4, 2, 64, page_size=24, causal=False)
    attn = BlockSparseAttention(
        spec, num_rows=90, num_cols=240, block_rows=40, num_heads=num_heads, max_blocks=6
    )
    mask = torch.rand(num_heads, attn.row_blocks, attn.col_blocks, generator=random).argsort(-1) < 6
    shapes = ((90, 4, 64), (240, 2, 64), (240, 2, 64))
    tensors = tuple(torch.randn(shape, generator=random).bfloat16() for shape in shapes)
    return attn, mask, tensors


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_blocks_of_each_head(num_heads: int) -> None:
    attn, mask, (q, k, v) = blocks(num_heads)
    attn.plan(mask)
    out = attn.run(q, k, v)
    for head in range(4):
        seen = mask[head * num_heads // 4].repeat_interleave(40, 0).repeat_interleave(24, 1)[:90, :240]
        keys, values = (x[:, head // 2, None] for x in (k, v))
        o, _ = attention(q[:, head, None], keys, values, causal=False, mask=seen)
        amplitude, _ = attention(q[:, head, None], keys, values.abs(), causal=False, mask=seen)
        assert_close(f"head {head}", out[:, head, None], o, amplitude=amplitude)


def test_rows_that_choose_too_much_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU refuses a GPU cannot look at: the rows get pages that no cache has."""
    monkeypatch.setattr(BlockSelection, "_expect", lambda *_: None)
    attn, mask, (q, k, v) = blocks(1)
    mask[0, 1] = True
    attn.plan(mask)
    out = attn.run(q, k, v)
    assert out[40:80].isnan().all()
    assert out[:40].isfinite().all()
    assert out[80:].isfinite().all()
