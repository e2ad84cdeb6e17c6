# SPDX-License-Identifier: Apache-2.0
"""Composed steps on the CPU that must not run: plans out of date, tables and forests that are none."""

from __future__ import annotations

import pytest
import torch
from attention_batch import SPLIT_COSTS
from numeric import assert_bitwise_equal

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError

SPEC = AttentionSpec(8, 2, 64, dtype="float32", page_size=16)
BLOCKS = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]], dtype=torch.int32)
LENS = torch.tensor([60, 50, 40], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
FOREST = PrefixForest(
    torch.tensor([[-1, 0, 32, 0, 3]], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
)


def planned(starts: torch.Tensor = STARTS, lens: torch.Tensor = LENS) -> tuple[BatchAttention, Plan]:
    attn = BatchAttention(SPEC, max_requests=4, max_tokens=8, max_kv_len=64, num_ctas=4, costs=SPLIT_COSTS,
                          sharing=SharingLimits(2, 2, 8))  # fmt: skip
    attn.plan(starts, PageTable.from_block_table(BLOCKS, lens, page_size=16))
    plan = attn.plan(starts, PageTable.from_block_table(BLOCKS, lens, page_size=16), forest=FOREST)
    assert plan is not None
    assert plan.header["num_nodes"] == 1
    return attn, plan


def run(attn: BatchAttention, tokens: int = 3) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    cache = torch.randn(8, 16, 2, 64, generator=random)
    return attn.run(torch.randn(tokens, 8, 64, generator=random), cache, cache)


def test_lengths_may_shrink_to_the_shared_pages() -> None:
    lens = LENS.clone()
    attn, _ = planned(lens=lens)
    lens.copy_(torch.tensor([33, 50, 34]))
    out = run(attn)
    flat = BatchAttention(SPEC, max_requests=4, max_tokens=8, max_kv_len=64)
    flat.plan(STARTS, PageTable.from_block_table(BLOCKS, lens, page_size=16))
    torch.testing.assert_close(out, run(flat))


@pytest.mark.parametrize(
    ("lens", "starts", "message"),
    [
        (
            [60, 32, 40],
            [0, 1, 2, 3],
            r"^kv_lens\[1\]: expected the 32 tokens of its planned prefix before its 1",
        ),
        ([20, 50, 40], [0, 0, 1, 2], r"^kv_lens\[0\]: expected at least the 32 tokens of the planned prefix"),
        ([60, 50, 40], [0, 0, 1, 2], r"^qo_indptr\[1\]: expected 1, as planned.*got 0"),
        ([60, 50, 40], [1, 2, 3, 4], r"^qo_indptr\[0\]: expected 0, as planned.*got 1"),
    ],
)
def test_a_plan_that_is_out_of_date_is_refused(lens: list[int], starts: list[int], message: str) -> None:
    now, at = LENS.clone(), STARTS.clone()
    attn, _ = planned(at, now)
    now.copy_(torch.tensor(lens))
    at.copy_(torch.tensor(starts))
    before = attn._workspace.clone()
    with pytest.raises(ValueError, match=message):
        run(attn, tokens=4)
    assert_bitwise_equal("workspace", attn._workspace, before)


def test_a_row_of_the_table_that_ends_in_the_prefix_is_refused() -> None:
    starts, lens = STARTS.clone(), LENS.clone()
    attn, _ = planned(starts, lens)
    starts.copy_(
        torch.tensor([0, 0, 0, 1])
    )  # the first request has no query any more, so that its length is free
    table = attn._table
    assert table is not None
    attn._table = PageTable(**{**{name: getattr(table, name) for name in table.__slots__},
                               "row_end": table.row_begin + 1})  # fmt: skip
    with pytest.raises(ValueError, match=r"^kv_lens\[(0|2)\]: expected at (least|most)"):
        run(attn)


def test_a_request_that_lost_its_queries_is_left_out() -> None:
    starts = STARTS.clone()
    attn, _ = planned(starts)
    whole = run(attn)
    starts[3] = 2
    out = run(attn, tokens=2)
    torch.testing.assert_close(out, whole[:2])


def test_debug_mode_compares_the_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    attn, _ = planned()
    run(attn)
    assert attn._table is not None
    other = BLOCKS.clone()
    other[1, 1] = 5
    attn._table = PageTable.from_block_table(other, LENS, page_size=16)
    with pytest.raises(ValueError, match=r"^page table: expected request 1 to share its first 32 tokens"):
        run(attn)


def test_debug_mode_checks_the_pages_of_nodes_whose_members_have_no_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes' items run all the same, and look pages up in the row of their first member."""
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    starts = STARTS.clone()
    attn, _ = planned(starts)
    starts.zero_()
    run(attn)
    other = BLOCKS.clone()
    other[0, 1] = 8
    attn._table = PageTable.from_block_table(other, LENS, page_size=16)
    with pytest.raises(ValueError, match=r"^page table: expected page ids in 0..7; got 8 for request 0"):
        run(attn)


def nodes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, 5)


@pytest.mark.parametrize(
    ("rows", "members", "message"),
    [
        ([[0, 0, 32, 0, 3]], [0, 1, 2], r"parent: expected -1 or a node before; got 0"),
        ([[-2, 0, 32, 0, 3]], [0, 1, 2], r"parent: .*got -2"),
        ([[-1, 16, 32, 0, 3]], [0, 1, 2], r"begin: expected 0, where the node above ends; got 16"),
        ([[-1, 0, 20, 0, 3]], [0, 1, 2], r"end: expected a multiple of the page size 16 above 0; got 20"),
        ([[-1, 0, 0, 0, 3]], [0, 1, 2], r"end: expected a multiple .*got 0"),
        ([[-1, 0, -16, 0, 3]], [0, 1, 2], r"end: expected a multiple .*got -16"),
        ([[-1, 0, 48, 0, 3]], [0, 1, 2], r"end: .*at most the 32 tokens that request 2 may share.*got 48"),
        ([[-1, 0, 32, 0, 1]], [0, 1, 2], r"member_begin, member_end: .*two or more of the 3.*got 0, 1"),
        ([[-1, 0, 32, 0, 4]], [0, 1, 2], r"member_begin, member_end: .*got 0, 4"),
        ([[-1, 0, 32, -1, 2]], [0, 1, 2], r"member_begin, member_end: .*got -1, 2"),
        ([[-1, 0, 32, 2147483647, -2147483648]], [0, 1, 2], r"member_begin, member_end: "),
        ([[-1, 0, 32, 0, 3]], [0, 1, 3], r"members: expected requests 0 \.\. 2; got 3"),
        ([[-1, 0, 32, 0, 3]], [-1, 1, 2], r"members: expected requests 0 \.\. 2; got -1"),
        ([[-1, 0, 32, 0, 3]], [0, 2, 1], r"members: expected ascending requests; got 1 after 2"),
        ([[-1, 0, 32, 0, 3]], [0, 1, 1], r"members: expected ascending requests; got 1 after 1"),
        ([[-1, 0, 32, 0, 2], [-1, 0, 16, 2, 4]], [0, 1, 1, 2], r"members: .*no other node.*got 1"),
        ([[-1, 0, 16, 0, 2], [0, 16, 32, 2, 4]], [0, 1, 1, 2], r"members: .*node above.*got 2"),
        ([[-1, 0, 16, 0, 2], [0, 0, 32, 0, 2]], [0, 1], r"begin: expected 16.*got 0"),
    ],
)  # fmt: skip
def test_forests_that_are_none(rows: list[list[int]], members: list[int], message: str) -> None:
    attn, _ = planned()
    first = run(attn)
    before = attn._plan_buffer.tensor.clone()
    table = PageTable.from_block_table(BLOCKS, LENS, page_size=16)
    forest = PrefixForest(nodes(*rows), torch.tensor(members, dtype=torch.int32))
    with pytest.raises(PlanError, match=rf"^forest\.nodes\[\d\]: {message}"):
        attn.plan(STARTS, table, forest=forest)
    assert_bitwise_equal("plan", attn._plan_buffer.tensor, before)
    assert_bitwise_equal("out", run(attn), first)


def test_a_forest_needs_room_and_its_type() -> None:
    table = PageTable.from_block_table(BLOCKS, LENS, page_size=16)
    attn = BatchAttention(SPEC, max_requests=4, max_tokens=8, max_kv_len=64)
    with pytest.raises(PlanError, match=r"^forest: expected a BatchAttention with sharing="):
        attn.plan(STARTS, table, forest=FOREST)
    with pytest.raises(TypeError, match=r"^forest: expected a PrefixForest; got list"):
        attn.plan(STARTS, table, forest=[])  # type: ignore[arg-type]


def test_an_empty_forest_gives_the_plan_without_one() -> None:
    attn, _ = planned()
    table = PageTable.from_block_table(BLOCKS, LENS, page_size=16)
    empty = PrefixForest(nodes(), torch.empty(0, dtype=torch.int32))
    first = attn.plan(STARTS, table)
    assert first is not None
    plain = first.tobytes()
    again = attn.plan(STARTS, table, forest=empty)
    assert again is not None
    assert again.tobytes() == plain


def test_shareable_is_what_plan_accepts() -> None:
    assert shareable(torch.ones(3, dtype=torch.int32), LENS, 16, 4, 128).tolist() == [48, 48, 32]


@pytest.mark.parametrize("field", ["max_nodes", "max_levels", "max_tokens"])
def test_limits_name_their_field(field: str) -> None:
    good = {"max_nodes": 1, "max_levels": 1, "max_tokens": 1}
    with pytest.raises(ValueError, match=rf"^{field}: expected 1 .*got 0"):
        SharingLimits(**good | {field: 0})
    with pytest.raises(TypeError, match=rf"^{field}: expected an int; got True"):
        SharingLimits(**good | {field: True})
