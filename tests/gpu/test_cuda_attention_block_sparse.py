# SPDX-License-Identifier: Apache-2.0
"""Chosen blocks on CUDA: masks of each head, one graph for masks of many steps, choices that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_device import capture, device, no_waiting, only_on_cuda, synchronize
from gpu_specs import spec
from numeric import assert_close
from oracle import attention
from torch import Tensor

from fi_backend import BlockSparseAttention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

ROWS, COLS, BR, BC, HQ, HKV = 100, 720, 32, 48, 8, 2


class Sequence:
    """One sequence of ROWS queries and COLS keys, whose mask is filled in place."""

    def __init__(self, num_heads: int, **options: Any) -> None:
        self.spec = spec("128", HQ, HKV, page_size=BC, **options)
        self.attention = BlockSparseAttention(
            self.spec, num_rows=ROWS, num_cols=COLS, block_rows=BR, num_heads=num_heads, device=device()
        )
        self.random = torch.Generator().manual_seed(num_heads)
        shape = (num_heads, self.attention.row_blocks, self.attention.col_blocks)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device())
        dtype = getattr(torch, self.spec.dtype)
        self.q, self.k, self.v = (
            torch.randn(n, heads, 128, generator=self.random).to(device(), dtype)
            for n, heads in ((ROWS, HQ), (COLS, HKV), (COLS, HKV))
        )
        self.out = torch.empty_like(self.q)

    def choose(self, density: float) -> None:
        self.mask.copy_(torch.rand(self.mask.shape, generator=self.random) < density)
        self.out.fill_(torch.nan)

    def step(self) -> None:
        self.attention.plan(self.mask)
        self.attention.run(self.q, self.k, self.v, out=self.out)

    def seen(self, head: int) -> Tensor:
        mask = self.mask.cpu()[head * self.mask.shape[0] // HQ]
        seen = mask.repeat_interleave(BR, 0).repeat_interleave(BC, 1)[:ROWS, :COLS]
        if self.spec.causal:
            position, column = torch.arange(ROWS) + COLS - ROWS, torch.arange(COLS)
            begin = position - torch.arange(ROWS) % BR
            own = column // BC >= begin[:, None] // BC
            seen = (seen | own) & (column <= position[:, None])
        return seen

    def check(self) -> None:
        synchronize()
        q, k, v, out = (x.cpu() for x in (self.q, self.k, self.v, self.out))
        for head in range(HQ):
            kv = head * HKV // HQ
            rule: dict[str, Any] = {"mask": self.seen(head), "causal": False, "scale": self.spec.scale}
            keys, values = k[:, kv, None], v[:, kv, None]
            expected, _ = attention(q[:, head, None], keys, values, **rule)
            amplitude, _ = attention(q[:, head, None], keys, values.abs(), **rule)
            assert_close(f"head {head}", out[:, head, None], expected, amplitude=amplitude)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_heads", [1, HKV, HQ])
def test_masks_of_heads(num_heads: int, causal: bool) -> None:
    sequence = Sequence(num_heads, causal=causal)
    sequence.choose(0.3)
    sequence.step()
    sequence.check()


def test_a_graph_serves_the_masks_of_many_steps() -> None:
    sequence = Sequence(HKV, causal=False)
    sequence.choose(0.5)
    sequence.step()
    replay = capture(sequence.step)
    for density in (0.1, 0.9, 0.0, 0.4):
        sequence.choose(density)
        replay()
        sequence.check()


def test_nothing_waits() -> None:
    sequence = Sequence(HKV, causal=False)
    sequence.choose(0.5)
    sequence.step()
    sequence.choose(0.2)
    with no_waiting():
        sequence.step()
    sequence.check()


def test_more_blocks_than_there_is_room_for_give_nan() -> None:
    only_on_cuda()
    attn = BlockSparseAttention(
        spec("128", HQ, HKV, page_size=BC, causal=False),
        num_rows=2 * BR,
        num_cols=COLS,
        block_rows=BR,
        max_blocks=2,
        device=device(),
    )
    mask = torch.zeros(2, attn.col_blocks, dtype=torch.bool, device=device())
    mask[0, :2], mask[1, :3] = True, True
    q, k = (torch.randn(n, h, 128, dtype=torch.bfloat16, device=device()) for n, h in ((64, HQ), (COLS, HKV)))
    attn.plan(mask)
    out = attn.run(q, k, k)
    assert out[:BR].isfinite().all()
    assert out[BR:].isnan().all()
