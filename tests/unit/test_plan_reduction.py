# SPDX-License-Identifier: Apache-2.0
"""The reduction map: which partial states there are, where they lie, and in which order they are merged."""

from __future__ import annotations

from examples import share
from hypothesis import example, given
from plan_cases import PlanCase, cases

from fi_backend.core.plan import Plan


def states(case: PlanCase, item: object, first: bool) -> int:
    """Partial states of a split item: one, or one a grid chunk when a later item of the invariant mode."""
    grid = case.cost_model.invariant_grid
    length = int(item["kv_end"] - item["kv_begin"])  # type: ignore[index]
    return -(-length // grid) if case.invariant and not first else 1


@share(400)
@given(cases(max_kv=60_000))
@example(PlanCase((1,), (2_000_000,), num_ctas=264, invariant=True, group=3, heads=2))
@example(PlanCase((7, 1, 200), (9000, 100_000, 40_000), num_ctas=132, group=6))
def test_units_partition_the_split_items(case: PlanCase) -> None:
    plan = case.plan()
    items, units, parts = plan.items, plan.units, plan.parts
    used_rows: set[int] = set()
    next_part = 0
    for number, unit in enumerate(units):
        mine = sorted((i for i in items if i["unit"] == number), key=lambda i: i["kv_begin"])
        assert len(mine) == unit["num_items"] >= 2
        for item in mine:
            assert [item[f] for f in ("request", "q_begin", "q_rows")] == [
                unit[f] for f in ("request", "q_begin", "q_rows")
            ]
        assert unit["parts_begin"] == next_part
        expected = []
        for position, item in enumerate(mine):
            count = states(case, item, first=position == 0)
            expected += [int(item["partial"]) + s * int(unit["q_rows"]) for s in range(count)]
        assert parts[unit["parts_begin"] : unit["parts_end"]].tolist() == expected, "parts in KV order"
        for row in expected:
            rows = set(range(row, row + int(unit["q_rows"])))
            assert not rows & used_rows, "partial states do not overlap"
            used_rows |= rows
        next_part = int(unit["parts_end"])
    assert next_part == len(parts)
    header = plan.header
    assert header["num_partial_rows"] == len(used_rows) == max(used_rows, default=-1) + 1
    for item in items:
        assert (item["unit"] < 0) == (item["partial"] < 0)
        assert item["unit"] < len(units)


@share(300)
@given(cases(max_requests=30, max_kv=200_000))
@example(PlanCase((1,), (1_000_000,), num_ctas=1, heads=8, invariant=True))
@example(PlanCase((1,), (1_000_000,), num_ctas=264, heads=8, invariant=True, costs="fine"))
@example(PlanCase((2000,), (100,), group=64, num_ctas=1))
@example(PlanCase((1, 1), (1, 2**31 - 1), num_ctas=264))
@example(PlanCase((1,) * 50, (2**31 - 1,) * 50, num_ctas=1, heads=8))
@example(PlanCase((1,) * 50, (2**31 - 1,) * 50, num_ctas=1, heads=8, invariant=True, window_left=5))
def test_no_plan_within_the_limits_exceeds_the_capacities(case: PlanCase) -> None:
    planner = case.planner()
    plan = case.plan(planner)
    requests, items, units, parts, rows, queues, entries, *_, counters = planner.capacity
    header = plan.header
    assert len(plan.items) <= items
    assert len(plan.units) <= units
    assert len(plan.parts) <= parts
    assert header["num_partial_rows"] <= rows
    assert len(plan.kv_len_bounds) <= requests
    assert counters == 2 + units * case.heads
    assert len(plan.queues) == queues == (case.num_ctas if case.planned_queues else 0)
    assert sum(map(len, plan.queues)) <= entries


def test_split_really_happens_where_it_pays() -> None:
    assert len(PlanCase((1,), (100_000,), num_ctas=132).plan().items) >= 100
    assert len(PlanCase((1,), (100_000,), num_ctas=1).plan().units) == 0
    assert len(PlanCase((1,), (100_000,), num_ctas=132, invariant=True).plan().units) == 1


def counters(plan: Plan, count: int) -> bytes:
    return plan.buffer[plan.layout.counters : plan.layout.counters + 4 * count].tobytes()


def test_every_plan_zeroes_the_counters() -> None:
    """An aborted launch leaves arrivals behind; they must not reach the next step."""
    case = PlanCase((1, 1), (100_000, 5), num_ctas=16, heads=2)
    planner = case.planner()
    count = planner.capacity[-1]
    assert counters(case.plan(planner, poison=0xAB), count) == bytes(4 * count)
