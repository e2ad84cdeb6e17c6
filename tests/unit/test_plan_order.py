# SPDX-License-Identifier: Apache-2.0
"""The order of the items, the queues of Algorithm 1, the balance, and equal lengths giving equal bytes."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import example, given
from hypothesis import strategies as st
from plan_cases import PlanCase, cases

from fi_backend.core.plan import Plan

INT32_MAX = 2**31 - 1


def model_cost(case: PlanCase, item: np.void) -> int:
    costs = case.cost_model
    tile = int(item["tile_log2"])
    beta = costs.beta[(0, 4, 5, 6, 7).index(tile)]
    split = costs.part_cost if item["unit"] >= 0 else 0
    return min(INT32_MAX, costs.alpha * (1 << tile) + beta * int(item["kv_end"] - item["kv_begin"]) + split)


@share(300)
@given(cases(max_requests=60))
@example(PlanCase((1,) * 300, tuple(range(300)), num_ctas=132))
@example(PlanCase((1, 1), (2**31 - 1, 2**31 - 1)))
def test_items_stand_longest_first_with_ties_in_generation_order(case: PlanCase) -> None:
    """Lengths are told apart in 128 to 256 steps up to the longest."""
    items = case.plan().items
    for item in items:
        assert item["cost"] == model_cost(case, item)
    step = max(0, int(items["cost"].max(initial=0)).bit_length() - 8)
    keys = [
        (-(int(i["cost"]) >> step), int(i["request"]), int(i["q_begin"]), int(i["kv_begin"])) for i in items
    ]
    assert keys == sorted(keys)


@share(200)
@given(cases(max_requests=60))
@example(PlanCase((1,) * 300, tuple(range(300)), num_ctas=132, heads=8))
@example(PlanCase((1,) * 16, (1024,) * 16, num_ctas=132, heads=8))
def test_bundles_are_all_items_of_the_buckets_below_half_a_share(case: PlanCase) -> None:
    """2^k heads of an item cost at most half of the mean load of a CTA."""
    plan = case.plan()
    costs = plan.items["cost"].astype(object)
    step = max(0, int(costs.max(initial=0)).bit_length() - 8)
    for k in (1, 2, 3):
        limit = (int(costs.sum()) * case.heads // case.num_ctas) >> (k + 1)
        fits = [((int(cost) >> step) + 1 << step) - 1 <= limit for cost in costs]
        assert plan.header[f"bundled_by_{2**k}"] == sum(fits)
        assert fits == sorted(fits), "they stand at the end"


@share(200)
@given(cases(max_requests=60))
@example(PlanCase((500, *(1,) * 64), (8192, *(4096,) * 64), num_ctas=132, heads=8, group=4))
def test_ctas_at_the_end_read_while_the_others_compute(case: PlanCase) -> None:
    plan = case.plan()
    costs, wide = plan.items["cost"].astype(object), plan.items["tile_log2"] >= 6
    computing, reading = int(costs[wide].sum()), int(costs[~wide].sum()) // 5 * 2
    expected = 0
    if computing:
        expected = min(reading // ((computing + reading) // case.num_ctas + 1), case.num_ctas // 2)
    assert plan.header["back_ctas"] == expected


def test_a_mixed_step_has_some_ctas_at_the_end() -> None:
    case = PlanCase((500, *(1,) * 64), (8192, *(4096,) * 64), num_ctas=132, heads=8, group=4)
    assert 20 < case.plan().header["back_ctas"] <= 66
    assert PlanCase((1,) * 64, (4096,) * 64, num_ctas=132, heads=8).plan().header["back_ctas"] == 0


@share(100)
@given(cases(max_requests=60))
@example(PlanCase((1,) * 300, tuple(range(300)), num_ctas=132, heads=8))
@example(PlanCase((1,) * 16, (1024,) * 16, num_ctas=2, heads=8))
@example(PlanCase((500, *(1,) * 64), (8192, *(4096,) * 64), num_ctas=132, heads=8, group=4))
@example(PlanCase((1, 1), (2**31 - 1, 2**31 - 1)))
def test_without_lpt_the_same_items_stand_in_the_order_of_the_requests(case: PlanCase) -> None:
    plan, ordered = replace(case, longest_first=False).plan(), case.plan()
    keys = [(int(i["request"]), int(i["q_begin"]), int(i["kv_begin"])) for i in plan.items]
    assert keys == sorted(keys)
    np.testing.assert_array_equal(np.sort(plan.items), np.sort(ordered.items))
    for name in ("units", "parts", "kv_len_bounds"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(ordered, name))
    ends = ("bundled_by_2", "bundled_by_4", "bundled_by_8", "back_ctas")
    assert {**plan.header, **dict.fromkeys(ends)} == {**ordered.header, **dict.fromkeys(ends)}
    assert plan.header["back_ctas"] == 0, "the end of the list is like any other place"
    costs = plan.items["cost"].astype(object)
    below = 1 << int(costs.max(initial=0)).bit_length()
    for k in (1, 2, 3):
        limit = (int(costs.sum()) * case.heads // case.num_ctas) >> (k + 1)
        # All items or none: any of them may stand at the end.
        assert plan.header[f"bundled_by_{2**k}"] == len(costs) * (below - 1 <= limit)


def test_some_steps_are_in_another_order_and_bundled_without_lpt() -> None:
    skewed = PlanCase((1,) * 4, (100, 900, 300, 500), num_ctas=1)
    assert skewed.plan().items["request"].tolist() == [1, 3, 2, 0]
    assert replace(skewed, longest_first=False).plan().items["request"].tolist() == [0, 1, 2, 3]
    many = PlanCase((1,) * 64, (1024,) * 64, num_ctas=2, heads=8, longest_first=False)
    assert many.plan().header["bundled_by_8"] == 64


def algorithm_1(plan: Plan, heads: int, num_ctas: int) -> list[list[tuple[int, int]]]:
    """The paper's queues with Python's own heap: each (item, head) to the CTA of least cost so far."""
    heap = [(0, cta) for cta in range(num_ctas)]
    queues: list[list[tuple[int, int]]] = [[] for _ in range(num_ctas)]
    for index, cost in enumerate(plan.items["cost"].tolist()):
        for head in range(heads):
            load, cta = heapq.heappop(heap)
            queues[cta].append((index, head))
            heapq.heappush(heap, (load + cost, cta))
    return queues


@share(200)
@given(cases(max_requests=40).filter(lambda case: case.planned_queues))
def test_queues_are_those_of_algorithm_1(case: PlanCase) -> None:
    plan = case.plan()
    queues = [[tuple(pair) for pair in queue.tolist()] for queue in plan.queues]
    assert queues == algorithm_1(plan, case.heads, case.num_ctas)
    plan = replace(case, longest_first=False).plan()
    queues = [[tuple(pair) for pair in queue.tolist()] for queue in plan.queues]
    assert queues == algorithm_1(plan, case.heads, case.num_ctas), "each item to the least loaded CTA"


@share(150)
@given(cases(), st.integers(1, 255))
def test_equal_lengths_give_equal_bytes_in_any_buffer(case: PlanCase, poison: int) -> None:
    planner = case.planner()
    clean = case.plan(planner)
    poisoned = case.plan(planner, poison=poison)
    assert clean.tobytes() == poisoned.tobytes() == case.plan().tobytes()
    first = PlanCase(case.q_lens[:1], case.kv_lens[:1], group=case.group)
    for step in (first, case):
        step.fill(planner, torch.from_numpy(poisoned.buffer))
    assert poisoned.tobytes() == clean.tobytes(), "the plan before leaves nothing behind"


def makespan(plan: Plan, heads: int, num_ctas: int) -> int:
    """Load of the busiest CTA when each free CTA draws the next ticket."""
    loads = [0] * num_ctas
    for cost in plan.items["cost"].tolist():
        for _ in range(heads):
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def bound(case: PlanCase, plan: Plan) -> float:
    """No schedule can be shorter: the unsplit work shared evenly, or one chunk of the least length."""
    costs = case.cost_model
    work = sum(model_cost(case, i) - costs.part_cost * int(i["unit"] >= 0) for i in plan.items)
    return work * case.heads / case.num_ctas


def zipf(count: int, longest: int) -> tuple[int, ...]:
    lengths = [max(1, longest // rank) for rank in range(1, count + 1)]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


SKEWED = {
    "one giant among short ones": ((1,) * 256, (100_000,) + (500,) * 255),
    "zipf": ((1,) * 256, zipf(256, 200_000)),
    "alone": ((1,), (150_000,)),
    "one more than CTAs": ((1,) * 133, (20_000,) * 133),
    "prefill beside decode": ((4000,) + (1,) * 100, (9000, *zipf(100, 30_000))),
    "two prefills": ((8000, 100), (8000, 50_000)),
}


@pytest.mark.parametrize("lens", SKEWED.values(), ids=SKEWED)
@pytest.mark.parametrize(("heads", "group", "num_ctas"), [(8, 4, 132), (1, 1, 132), (8, 4, 2), (2, 7, 264)])
@pytest.mark.parametrize("costs", ["gpu", "cpu"])
def test_skewed_batches_are_balanced(
    lens: tuple[tuple[int, ...], tuple[int, ...]], heads: int, group: int, num_ctas: int, costs: str
) -> None:
    case = PlanCase(*lens, group=group, heads=heads, num_ctas=num_ctas, costs=costs)
    plan = case.plan()
    assert makespan(plan, heads, num_ctas) <= 1.5 * bound(case, plan)
