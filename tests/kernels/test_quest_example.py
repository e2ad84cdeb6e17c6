# SPDX-License-Identifier: Apache-2.0
"""The Quest example: bounds that hold, pages that matter, attention over these pages and no other key."""

from __future__ import annotations

from typing import Any

import example_modules
import pytest
import torch
from numeric import assert_close, assert_lse_close
from oracle import attention
from torch import Tensor

from fi_backend import AttentionSpec, BatchAttention, HeadPages, PageTable, append_kv

quest = example_modules.load("quest/quest")
HQ, HKV, DIM, PAGE, NUM_PAGES, BLOCKS = 6, 2, 32, 8, 64, 16


class Batch:
    """Decoding requests whose keys were appended in pieces; unused slots are NaN, unused table entries -1."""

    def __init__(self, top: int, lens: tuple[int, ...] = (100, 37, 8, 121), dtype: str = "float32") -> None:
        random = torch.Generator().manual_seed(0)
        kind = getattr(torch, dtype)
        self.spec = AttentionSpec(HQ, HKV, DIM, dtype=dtype, page_size=PAGE)
        self.k_cache, self.v_cache = torch.full((2, NUM_PAGES, PAGE, HKV, DIM), torch.nan, dtype=kind)
        order = torch.randperm(NUM_PAGES, generator=random).int().view(len(lens), BLOCKS)
        held = torch.arange(BLOCKS) * PAGE < torch.tensor(lens)[:, None]
        self.table = torch.where(held, order, -1).int()
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.q = torch.randn(len(lens), HQ, DIM, generator=random).to(kind)
        self.keys, self.values = (
            [torch.randn(n, HKV, DIM, generator=random).to(kind) for n in lens] for _ in range(2)
        )
        self.quest = quest.QuestAttention(self.spec, max_requests=6, num_pages=NUM_PAGES, top=top)
        # Pages had other keys before.
        stale = torch.full((NUM_PAGES * PAGE, HKV, DIM), 100.0, dtype=kind)
        self.quest.bounds.append(stale, torch.arange(NUM_PAGES * PAGE))

    def append(self, pieces: int = 3) -> None:
        for request, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            slots = self.table[request].long().repeat_interleave(PAGE) * PAGE + torch.arange(PAGE).repeat(
                BLOCKS
            )
            slots = slots[: len(keys)]
            for k, v, at in zip(*(x.chunk(pieces) for x in (keys, values, slots)), strict=True):
                padded = torch.cat((at, torch.tensor([-1])))
                append_kv(k, v, self.k_cache, self.v_cache, at)
                self.quest.bounds.append(torch.cat((k, k[:1])), padded)

    def run(self) -> tuple[Any, Tensor, Tensor]:
        pages = HeadPages(self.k_cache, self.v_cache)
        choice = self.quest.choose(self.q, self.table, self.lens, pages)
        self.quest.plan(choice)
        lse = torch.full((len(self.lens), HQ), torch.nan)
        return choice, self.quest.run(self.q, pages, lse), lse

    def compare(self, choice: Any, out: Tensor, lse: Tensor) -> None:
        """Every head against the oracle over the tokens of the pages that its KV head chose."""
        for request, length in enumerate(self.lens.tolist()):
            for head in range(HQ):
                kv = head * HKV // HQ
                block = torch.arange(length) // PAGE
                tokens = torch.isin(block, choice.blocks[request, kv])
                keys, values = (x[request][tokens][:, kv, None] for x in (self.keys, self.values))
                q = self.q[request, None, head, None]
                o, expected_lse = attention(q, keys, values)
                amplitude, _ = attention(q, keys, values.abs())
                name = f"request {request}, head {head}"
                assert_close(name, out[request, None, head, None], o, amplitude=amplitude)
                assert_lse_close(name, lse[request, None, head, None], expected_lse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top", [1, 4])
def test_attention_over_the_chosen_pages_alone(top: int, dtype: str) -> None:
    batch = Batch(top, dtype=dtype)
    batch.append()
    choice, out, lse = batch.run()
    batch.compare(choice, out, lse)
    counts = (choice.blocks >= 0).sum(-1)
    held = -(-batch.lens // PAGE)
    assert torch.equal(counts, held.clamp(max=top)[:, None].expand(-1, HKV))
    assert int(choice.table.kv_lens.max()) <= top * PAGE
    for request, newest in enumerate((held - 1).tolist()):
        assert (choice.blocks[request] == newest).any(-1).all()


def test_heads_choose_pages_of_their_own() -> None:
    batch = Batch(4)
    batch.append()
    choice, _, _ = batch.run()
    assert not torch.equal(choice.blocks[0, 0].sort().values, choice.blocks[0, 1].sort().values)


def test_bounds_hold_for_every_key_and_are_reached() -> None:
    batch = Batch(4)
    batch.append()
    bound = batch.quest.bounds.largest_product(batch.q, batch.table)
    for request, keys in enumerate(batch.keys):
        products = torch.einsum("hd,khd->hk", batch.q[request], keys.repeat_interleave(HQ // HKV, 1))
        for block, own in enumerate(products.split(PAGE, 1)):
            assert (own.amax(1) <= bound[request, :, block] + 1e-4).all()
            if own.shape[1] == 1:  # the bound of a page of one key is its product
                torch.testing.assert_close(own[:, 0], bound[request, :, block], rtol=1e-5, atol=1e-5)


def test_all_pages_are_dense_attention() -> None:
    batch = Batch(BLOCKS)
    batch.append()
    choice, out, lse = batch.run()
    assert torch.equal(choice.table.kv_lens.view(-1, HKV), batch.lens[:, None].expand(-1, HKV))
    batch.compare(choice, out, lse)
    dense = BatchAttention(batch.spec, max_requests=4, max_tokens=4, max_kv_len=BLOCKS * PAGE)
    dense.plan(
        torch.arange(5, dtype=torch.int32),
        PageTable.from_block_table(batch.table, batch.lens, page_size=PAGE),
    )
    torch.testing.assert_close(out, dense.run(batch.q, batch.k_cache, batch.v_cache), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("head", range(HKV))
def test_the_page_of_a_planted_key_is_chosen(head: int) -> None:
    batch = Batch(2)
    group = HQ // HKV
    where = (77, 20, 3, 5)
    for request, position in enumerate(where):
        batch.keys[request][position, head] = 4 * batch.q[request, head * group]
    batch.append()
    choice, _, _ = batch.run()
    for request, position in enumerate(where):
        assert position // PAGE in choice.blocks[request, head].tolist()


def test_layers_share_a_plan_and_choose_for_themselves() -> None:
    batch = Batch(4)
    batch.append()
    pages = HeadPages(batch.k_cache, batch.v_cache)
    batch.run()
    first = batch.q
    batch.q = -first  # what another layer asks
    choice = batch.quest.choose(batch.q, batch.table, batch.lens, pages)
    lse = torch.full((len(batch.lens), HQ), torch.nan)
    batch.compare(choice, batch.quest.run(batch.q, pages, lse), lse)


def test_the_script() -> None:
    assert "True" in example_modules.run("quest/example")


def test_no_page_is_no_choice() -> None:
    with pytest.raises(ValueError, match=r"^top: expected 1\.\.64 pages; got 0"):
        Batch(0)
