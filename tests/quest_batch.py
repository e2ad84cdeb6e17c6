# SPDX-License-Identifier: Apache-2.0
"""Decoding requests for examples/quest on any device, compared with the oracle over the chosen pages."""

from __future__ import annotations

from typing import Any

import example_modules
import torch
from numeric import assert_close, assert_lse_close
from oracle import attention
from torch import Tensor

from fi_backend import AttentionSpec, HeadPages, append_kv

quest = example_modules.load("quest/quest")
HQ, HKV, PAGE, NUM_PAGES, BLOCKS = 6, 2, 8, 64, 16


class QuestBatch:
    """Decoding requests whose keys were appended in pieces; unused slots are NaN, unused table entries -1."""

    def __init__(
        self,
        top: int,
        lens: tuple[int, ...] = (100, 37, 8, 121),
        *,
        dtype: str = "float32",
        head_dim: int = 32,
        device: str = "cpu",
    ) -> None:
        random = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        self.spec = AttentionSpec(HQ, HKV, head_dim, dtype=dtype, page_size=PAGE)
        self.device = device
        shape = (NUM_PAGES, PAGE, HKV, head_dim)
        self.k_cache, self.v_cache = torch.full((2, *shape), torch.nan, dtype=kind, device=device)
        order = torch.randperm(NUM_PAGES, generator=random).int().view(len(lens), BLOCKS)
        held = torch.arange(BLOCKS) * PAGE < torch.tensor(lens)[:, None]
        self.table = torch.where(held, order, -1).int().to(device)
        self.lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.q = torch.randn(len(lens), HQ, head_dim, generator=random).to(device, kind)
        self.keys, self.values = (
            [torch.randn(n, HKV, head_dim, generator=random).to(kind) for n in lens] for _ in range(2)
        )
        self.quest = quest.QuestAttention(
            self.spec, max_requests=6, num_pages=NUM_PAGES, top=top, device=device
        )
        # Pages had other keys before.
        stale = torch.full((NUM_PAGES * PAGE, HKV, head_dim), 100.0, dtype=kind, device=device)
        self.quest.bounds.append(stale, torch.arange(NUM_PAGES * PAGE, device=device))

    def append(self, pieces: int = 3) -> None:
        offsets = torch.arange(PAGE, device=self.device)
        for request, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            slots = (self.table[request].long()[:, None] * PAGE + offsets).flatten()[: len(keys)]
            there = keys.to(self.device), values.to(self.device), slots
            for k, v, at in zip(*(x.chunk(pieces) for x in there), strict=True):
                append_kv(k, v, self.k_cache, self.v_cache, at)
                # A token without a slot, as padding has.
                self.quest.bounds.append(torch.cat((k, k[:1])), torch.cat((at, at[:1] * 0 - 1)))

    def run(self) -> tuple[Any, Tensor, Tensor]:
        """Choose, plan and attend: (choice, out, lse)."""
        pages = HeadPages(self.k_cache, self.v_cache)
        choice = self.quest.choose(self.q, self.table, self.lens, pages)
        self.quest.plan(choice)
        lse = torch.full((len(self.lens), HQ), torch.nan, device=self.device)
        return choice, self.quest.run(self.q, pages, lse), lse

    def compare(self, choice: Any, out: Tensor, lse: Tensor) -> None:
        """Every head against the oracle over the tokens of the pages that its KV head chose."""
        blocks, queries, out, lse = (x.cpu() for x in (choice.blocks, self.q, out, lse))
        for request, length in enumerate(self.lens.tolist()):
            for head in range(HQ):
                kv = head * HKV // HQ
                block = torch.arange(length) // PAGE
                tokens = torch.isin(block, blocks[request, kv])
                keys, values = (x[request][tokens][:, kv, None] for x in (self.keys, self.values))
                q = queries[request, None, head, None]
                o, expected_lse = attention(q, keys, values)
                amplitude, _ = attention(q, keys, values.abs())
                name = f"request {request}, head {head}"
                assert_close(name, out[request, None, head, None], o, amplitude=amplitude)
                assert_lse_close(name, lse[request, None, head, None], expected_lse)
