# SPDX-License-Identifier: Apache-2.0
"""The Quest example: bounds that hold, pages that matter, attention over these pages and no other key."""

from __future__ import annotations

import example_modules
import pytest
import torch
from quest_batch import BLOCKS, HKV, HQ, PAGE, QuestBatch

from fi_backend import BatchAttention, HeadPages, PageTable


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top", [1, 4])
def test_attention_over_the_chosen_pages_alone(top: int, dtype: str) -> None:
    batch = QuestBatch(top, dtype=dtype)
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
    batch = QuestBatch(4)
    batch.append()
    choice, _, _ = batch.run()
    assert not torch.equal(choice.blocks[0, 0].sort().values, choice.blocks[0, 1].sort().values)


def test_bounds_hold_for_every_key_and_are_reached() -> None:
    batch = QuestBatch(4)
    batch.append()
    bound = batch.quest.bounds.largest_product(batch.q, batch.table)
    for request, keys in enumerate(batch.keys):
        products = torch.einsum("hd,khd->hk", batch.q[request], keys.repeat_interleave(HQ // HKV, 1))
        for block, own in enumerate(products.split(PAGE, 1)):
            assert (own.amax(1) <= bound[request, :, block] + 1e-4).all()
            if own.shape[1] == 1:  # the bound of a page of one key is its product
                torch.testing.assert_close(own[:, 0], bound[request, :, block], rtol=1e-5, atol=1e-5)


def test_all_pages_are_dense_attention() -> None:
    batch = QuestBatch(BLOCKS)
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
    batch = QuestBatch(2)
    group = HQ // HKV
    where = (77, 20, 3, 5)
    for request, position in enumerate(where):
        batch.keys[request][position, head] = 4 * batch.q[request, head * group]
    batch.append()
    choice, _, _ = batch.run()
    for request, position in enumerate(where):
        assert position // PAGE in choice.blocks[request, head].tolist()


def test_layers_share_a_plan_and_choose_for_themselves() -> None:
    batch = QuestBatch(4)
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
        QuestBatch(0)
