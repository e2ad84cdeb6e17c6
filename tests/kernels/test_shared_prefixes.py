# SPDX-License-Identifier: Apache-2.0
"""Composed steps on the CPU: the oracle's numbers, equal bits, plans that are out of date, bad forests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, counters, torch_threads
from attention_strategies import ROOMY, shared_batches
from engine_memory import Layout
from examples import share
from hypothesis import event, given
from numeric import assert_bitwise_equal, assert_close, assert_lse_close

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import PREFIX, Plan
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.sharing import SharingLimits, flat_reason
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError

PAIRS = [
    ("float32", "float32", 120),
    ("bfloat16", "bfloat16", 80),
    ("float16", "float16", 30),
    ("bfloat16", "float8_e4m3fn", 40),
    ("float16", "float8_e5m2", 20),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "count"), PAIRS, ids=[f"{q}-{kv}" for q, kv, _ in PAIRS])
def test_any_shared_batch_equals_the_oracle(dtype: str, kv_dtype: str, count: int) -> None:
    @share(count)
    @given(shared_batches(dtype, kv_dtype))
    def run(batch: Batch) -> None:
        nodes = check(batch).plan.header["num_nodes"]
        event(f"nodes: {min(nodes, 2)}")
        assert not (nodes and flat_reason(batch.spec))

    run()


# Sharing pays wherever it saves a key.
EAGER = replace(SPLIT_COSTS, alpha=0, part_cost=0)


def tree(spec: AttentionSpec, **changes: Any) -> Batch:
    """Two groups behind one prefix, one request without it, queries of one to three tokens, in no order."""
    page = spec.page_size
    q_lens = (1, 2, 1, 1, 3, 1, 1, 2)
    shares = ((0, 0), (0, 0), (0, 9), (0, 5), (2, 9), (3, 12), (0, 5), (5, 12))
    own = (9 * page + 20, 70, 33, 7 * page + 9, 15, 40, 100, 8)
    kv_lens = tuple(n * page + k for (_, n), k in zip(shares, own, strict=True))
    batch = Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, shares=shares, sharing=ROOMY, costs=EAGER)
    return replace(batch, num_ctas=2, **changes)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (10, 2), (7, 1), (4, 4), (64, 1)])
def test_two_levels_of_any_group(page_size: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, 64, dtype="float32", page_size=page_size)
    state = check(tree(spec))
    nested = {int(node["kv_end"]) // page_size for node in state.plan.nodes}
    assert {9, 12} <= nested, "a group of 64 fills tiles so soon that the node of five pages saves nothing"
    assert 5 in nested or heads == 64


@pytest.mark.parametrize(
    "change",
    [{"logits_soft_cap": 2.0}, {"sinks": True}, {"causal": False}, {"scale": -0.2}, {"head_dim_v": 33}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("table", ["block", "token", "csr"])
def test_variants_that_compose(change: dict[str, Any], table: str) -> None:
    spec = replace(AttentionSpec(10, 2, 64, dtype="bfloat16", page_size=16), **{"head_dim_v": 64} | change)
    layout = Layout(table=table, first_token=2, extra_tokens=3, q="qkv", out="heads", k="packed", v="packed")
    assert check(tree(spec, layout=layout)).plan.header["num_nodes"] >= 3


def test_planned_queues_run_composed_plans() -> None:
    spec = AttentionSpec(10, 2, 64, dtype="float32", page_size=16)
    assert check(tree(spec, planned_queues=True)).plan.header["num_nodes"] >= 3


@pytest.mark.parametrize(
    "change",
    [{"window_left": 1000}, {"batch_invariant": True}, {"custom_mask": True}, {"alibi": True}],
    ids=lambda change: next(iter(change)),
)
def test_variants_that_do_not_are_planned_flat(change: dict[str, Any]) -> None:
    spec = replace(AttentionSpec(10, 2, 64, dtype="float32", page_size=16), **change)
    assert flat_reason(spec)
    state = check(tree(spec))
    assert state.plan.header["num_nodes"] == 0
    without = EngineState(tree(spec, sharing=None))
    without.attention()
    assert state.plan.tobytes() == without.plan.tobytes()


def test_bits_do_not_depend_on_threads_or_on_the_launch_before() -> None:
    """Members of a node straddle two tiles, and nodes and own rows are split."""
    spec = AttentionSpec(20, 1, 64, dtype="bfloat16", page_size=16)
    q_lens = (1, 2, 1, 3, 1, 2) * 3
    shares = ((0, 0), *((0, 40) for _ in range(17)))
    kv_lens = (660, *(640 + 37 + 11 * i for i in range(17)))
    batch = Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, shares=shares, sharing=ROOMY, num_ctas=16,
                  costs=SPLIT_COSTS)  # fmt: skip
    with torch_threads(1):
        state = EngineState(batch)
        attn = state.attention()
        items = state.plan.items
        node = items[items["flags"] == PREFIX]
        assert len(set(node["q_begin"])) == 5, "600 rows are five tiles"
        assert len(set(node["kv_begin"])) > 1, "and they are split"
        out, lse = state.run(attn, threads=1)
        o, expected_lse, amplitude = state.expected()
        assert_close("out", state.inside(out), o, amplitude=amplitude)
        assert_lse_close("lse", state.inside(lse), expected_lse)
        for threads in (2, 3, 5, 2, 1):
            again, lse_again = state.run(attn, threads=threads)
            assert_bitwise_equal("out", again, out)
            assert_bitwise_equal("lse", lse_again, lse)
            assert not counters(attn).any()


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
