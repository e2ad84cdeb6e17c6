# SPDX-License-Identifier: Apache-2.0
"""Composed plans: every (row, key) is read once, states find their merges, nothing leaves the capacity."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from examples import share
from hypothesis import event, example, given
from plan_cases import PlanCase
from plan_checks import check_coverage, check_flags, check_reports
from shared_cases import ROOMY, SharedCase, reads, shared_cases

from fi_backend.core.plan import FIRST_CHUNK, PREFIX, SUFFIX
from fi_backend.core.sharing import SharingLimits


@share(400)
@given(shared_cases())
def test_every_row_meets_every_key_once(shared: SharedCase) -> None:
    case, plan = shared.plan_case, shared.plan()
    event(f"levels: {min(2, plan.header['num_nodes'])}")
    check_coverage(case, plan)
    check_reports(case, plan)
    check_flags(case, plan)


@share(300)
@given(shared_cases(max_pages=2000))
@example(
    SharedCase(
        paths=((0,),) * 40,
        run_pages={(0,): 20000},
        q_lens=(3,) * 40,
        own=(5,) * 40,
        sharing=SharingLimits(1, 1, 120),
        step=PlanCase((), (), num_ctas=264, costs="eager"),
    )
)
def test_no_composed_plan_exceeds_the_capacities(shared: SharedCase) -> None:
    planner = shared.planner()
    plan = shared.plan(planner)
    header = plan.header
    (requests, items, units, parts, rows, _, entries, nodes, tokens, reports, counters) = planner.capacity
    assert header["num_items"] <= items
    assert header["num_units"] <= units
    assert header["num_parts"] <= parts
    assert header["num_partial_rows"] <= rows
    assert header["num_nodes"] <= nodes == shared.sharing.max_nodes
    assert header["num_node_tokens"] <= tokens
    assert header["num_reports"] <= reports
    assert len(plan.kv_len_bounds) <= requests
    assert sum(map(len, plan.queues)) <= entries
    assert counters == 2 + units * shared.step.heads
    levels: Counter[int] = Counter(plan.node_tokens.tolist())
    assert max(levels.values(), default=0) <= shared.sharing.max_levels
    assert len(levels) <= shared.sharing.max_tokens


@share(200)
@given(shared_cases())
def test_equal_input_gives_equal_bytes_and_unshared_batches_their_old_plan(shared: SharedCase) -> None:
    planner = shared.planner()
    plan = shared.plan(planner)
    assert shared.plan(planner).tobytes() == plan.tobytes()
    apart = replace(shared, paths=((),) * len(shared.paths), own=tuple(kv for kv in shared.kv_lens))
    flat = apart.plan_case.plan(planner)
    assert apart.plan(planner).tobytes() == flat.tobytes()
    assert flat.header["num_nodes"] == 0
    if plan.header["num_nodes"] == 0:
        assert plan.tobytes() == shared.plan_case.plan(planner).tobytes()


def fan(count: int, prefix: int, own: int, **fields: Any) -> SharedCase:
    """`count` decoding requests behind one prefix of so many pages."""
    options: dict[str, Any] = {"step": PlanCase((), (), group=4, heads=8, num_ctas=132, costs="eager")}
    return SharedCase(
        paths=((0,),) * count,
        run_pages={(0,): prefix},
        q_lens=(1,) * count,
        own=(own,) * count,
        **(options | fields),
    )


def test_reads_fall_as_the_tree_predicts() -> None:
    one = fan(64, 256, 100)
    assert reads(one.plan_case.plan()) == 64 * (256 * 16 + 100)
    assert reads(one.plan()) == 2 * 256 * 16 + 64 * 100, "256 rows are two tiles of 128"

    paths = tuple((0, r % 3) for r in range(24))
    two = SharedCase(
        paths=paths,
        run_pages={(0,): 100, (0, 0): 40, (0, 1): 30, (0, 2): 20},
        q_lens=(1,) * 24,
        own=(50,) * 24,
        step=PlanCase((), (), group=5, heads=2, num_ctas=8, costs="eager"),
    )
    assert reads(two.plan()) == (100 + 40 + 30 + 20) * 16 + 24 * 50
    assert two.plan().header["num_nodes"] == 4
    assert (
        reads(replace(two, sharing=SharingLimits(64, 1, 64)).plan())
        == 100 * 16 + sum(8 * n * 16 for n in (40, 30, 20)) + 24 * 50
    )


def test_nodes_above_read_what_a_dropped_one_does_not() -> None:
    """A chain in which every request leaves at another page: no node pays by itself, together some do."""
    count = 32
    paths = tuple((0,) * (r + 1) for r in range(count))
    chain = SharedCase(
        paths=paths,
        run_pages={},
        q_lens=(1,) * count,
        own=(16,) * count,
        step=PlanCase((), (), group=4, heads=8, num_ctas=132, costs="cpu"),
    )
    plan = chain.plan(forest=chain.forest())
    assert 1 < plan.header["num_nodes"] <= ROOMY.max_levels
    assert reads(plan) < reads(chain.plan_case.plan()) / 2


@pytest.mark.parametrize("costs", ["cpu", "gpu"])
def test_sharing_is_left_where_it_does_not_pay(costs: str) -> None:
    step = PlanCase((), (), group=4, heads=8, num_ctas=132, costs=costs)
    assert fan(2, 1, 100, step=step).plan().header["num_nodes"] == 0
    assert fan(256, 256, 100, step=step).plan().header["num_nodes"] == 1


def test_limits_flatten_and_never_fail() -> None:
    shared = fan(64, 256, 100)
    for sharing, nodes in ((SharingLimits(1, 1, 64), 1), (SharingLimits(1, 1, 63), 0)):
        assert replace(shared, sharing=sharing).plan().header["num_nodes"] == nodes
    paths = tuple((r % 8,) for r in range(32))
    groups = replace(
        shared, paths=paths, run_pages={(g,): 64 for g in range(8)}, q_lens=(1,) * 32, own=(9,) * 32
    )
    assert groups.plan().header["num_nodes"] == 8
    few = replace(groups, sharing=SharingLimits(3, 1, 64)).plan()
    assert few.nodes["request"].tolist() == [0, 1, 2], "the first ones stay"
    tokens = replace(groups, sharing=SharingLimits(8, 1, 11)).plan()
    assert tokens.nodes["request"].tolist() == [0, 1], "four tokens each"


def test_prefill_requests_stay_flat_beside_composed_ones() -> None:
    shared = fan(9, 64, 400, sharing=ROOMY)
    mixed = replace(shared, q_lens=(1, 1, 1, 33, 1, 1, 1, 32, 1), step=replace(shared.step, num_ctas=4))
    plan = mixed.plan()
    assert plan.header["num_nodes"] == 1
    starts = mixed.plan_case.qo_indptr().tolist()
    assert not set(range(starts[3], starts[4])) & set(plan.node_tokens.tolist()), "132 rows are two tiles"
    assert set(range(starts[7], starts[8])) <= set(plan.node_tokens.tolist()), "128 are one"
    first = {
        int(i["request"]): int(i["flags"])
        for i in plan.items
        if i["flags"] & (FIRST_CHUNK | SUFFIX) and not i["flags"] & PREFIX
    }
    assert [first[r] & SUFFIX for r in range(9)] == [8, 8, 8, 0, 8, 8, 8, 8, 8]


def test_a_small_step_shares_only_where_that_takes_less_time() -> None:
    """Two readers on many idle CTAs: reading once saves work, and the way of the states costs more time."""
    costs = PlanCase((), (), group=4, heads=8, num_ctas=132, costs="coarse")
    assert fan(2, 256, 500, step=costs).plan().header["num_nodes"] == 0
    assert fan(2, 256, 500, step=replace(costs, num_ctas=1)).plan().header["num_nodes"] == 1


def test_a_node_above_kept_ones_is_judged_by_what_these_would_read() -> None:
    """Two groups of eight behind a short prefix: two tiles read it as cheaply as one of their own would."""
    step = PlanCase((), (), group=4, heads=8, num_ctas=1, costs="cheap levels")
    paths = tuple((0, r % 2) for r in range(16))
    runs = {(0,): 25, (0, 0): 200, (0, 1): 200}
    shared = SharedCase(
        paths=paths, run_pages=runs, q_lens=(1,) * 16, own=(9,) * 16, step=step, sharing=ROOMY
    )
    plan = shared.plan()
    assert plan.nodes["num_tokens"].tolist() == [8, 8]
    assert reads(plan) == 2 * 225 * 16 + 16 * 9
    alone = replace(shared, run_pages=runs | {(0, 0): 0, (0, 1): 0})
    assert alone.plan().nodes["num_tokens"].tolist() == [16], "without them it pays"
