# SPDX-License-Identifier: Apache-2.0
"""The order of the items, the queues of Algorithm 1, the balance, and equal lengths giving equal bytes."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import example, given
from hypothesis import strategies as st
from plan_cases import MIXED, PlanCase, cases
from shared_tables import host_plan, page_table, random_case, tree

from fi_backend.core.plan import PREFIX, Plan

INT32_MAX = 2**31 - 1


def model_cost(case: PlanCase, item: np.void) -> int:
    costs = case.cost_model
    tile = int(item["tile_log2"])
    beta = costs.beta[(0, 4, 5, 6, 7).index(tile)]
    split = costs.part_cost if item["unit"] >= 0 else 0
    return min(INT32_MAX, costs.alpha * (1 << tile) + beta * int(item["kv_end"] - item["kv_begin"]) + split)


T = TypeVar("T")


def drawn(case: PlanCase, plan: Plan, ordered: list[T]) -> list[T]:
    """Items in the order of their costs as they are drawn: two thirds of the CTAs begin with tall tiles."""
    tall = int((plan.items["tile_log2"] == 7).sum())
    first = max(1, (case.num_ctas - case.num_ctas // 3) // case.heads)
    if not case.cost_model.overlap or case.planned_queues or tall <= first:
        return ordered
    moved = tall + (len(ordered) - tall) * 5 // 8
    return ordered[:first] + ordered[tall:moved] + ordered[first:tall] + ordered[moved:]


@share(300)
@given(cases(max_requests=60))
@example(PlanCase((1,) * 300, tuple(range(300)), num_ctas=132))
@example(PlanCase((1, 1), (2**31 - 1, 2**31 - 1)))
@example(replace(MIXED, q_lens=(2048, *MIXED.q_lens[1:])))
def test_items_stand_longest_first_with_ties_in_generation_order(case: PlanCase) -> None:
    """Lengths are told apart in 128 to 256 steps up to the longest."""
    plan = case.plan()
    items = plan.items
    for item in items:
        assert item["cost"] == model_cost(case, item)
    step = max(0, int(items["cost"].max(initial=0)).bit_length() - 8)
    keys = [
        (-(int(i["cost"]) >> step), int(i["request"]), int(i["q_begin"]), int(i["kv_begin"])) for i in items
    ]
    assert keys == drawn(case, plan, sorted(keys))


def test_memory_is_read_while_tall_tiles_are_computed() -> None:
    """Of 132 CTAs 88 begin with the 8 heads of 11 tall items, the others with decoding requests."""
    for num_ctas, first in ((132, 11), (3, 1)):
        case = replace(MIXED, q_lens=(2048, *MIXED.q_lens[1:]), num_ctas=num_ctas)
        items = case.plan().items
        tall = (items["tile_log2"] == 7).tolist()
        assert tall.count(True) == 64
        others = tall.count(False)
        assert tall == [True] * first + [False] * (others * 5 // 8) + [True] * (64 - first) + [False] * (
            others - others * 5 // 8
        )
    decoding = replace(MIXED, q_lens=(1,) * 65)
    usual = replace(decoding, costs="gpu").plan().items
    assert len(usual) == 65
    assert decoding.plan().items["request"].tolist() == usual["request"].tolist()


def bundled(plan: Plan) -> list[int]:
    return [plan.header[f"bundled_by_{2**k}"] for k in (1, 2, 3)]


@share(100)
@given(cases(max_requests=60))
@example(PlanCase((1,) * 300, tuple(range(300)), num_ctas=132, heads=8))
def test_flat_plans_bundle_nothing(case: PlanCase) -> None:
    assert bundled(case.plan()) == [0, 0, 0]


def test_bundles_are_all_items_of_the_buckets_below_half_a_share() -> None:
    """Of a composed plan: 2^k heads of an item cost at most half of the mean load of a CTA.

    None of nodes, which have the first bucket; of the other costs the two greatest have one bucket.
    """
    some = 0
    for seed in range(150):
        case = random_case(seed)
        plan = host_plan(case.planner(), case, page_table(case))
        if plan.num_nodes == 0:
            assert bundled(plan) == [0, 0, 0]
            continue
        costs = plan.items["cost"].astype(object)
        nodes = (plan.items["flags"] & PREFIX > 0).tolist()
        step = max(0, int(costs.max(initial=0)).bit_length() - 8)
        for k, count in enumerate(bundled(plan), 1):
            limit = (int(costs.sum()) * case.step.heads // case.step.num_ctas) >> (k + 1)
            buckets = [255 if int(cost) >> step >= 254 else int(cost) >> step for cost in costs]
            fits = [
                not node and (bucket + 1 << step) - 1 <= limit
                for bucket, node in zip(buckets, nodes, strict=True)
            ]
            assert count == sum(fits)
            assert fits == sorted(fits), "they stand at the end"
            some += 0 < count < len(costs)
    assert some > 50


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
    assert plan.header == ordered.header


def test_some_steps_are_in_another_order_without_lpt() -> None:
    skewed = PlanCase((1,) * 4, (100, 900, 300, 500), num_ctas=1)
    assert skewed.plan().items["request"].tolist() == [1, 3, 2, 0]
    assert replace(skewed, longest_first=False).plan().items["request"].tolist() == [0, 1, 2, 3]
    case = replace(
        tree(1, 32, root_pages=200, group_pages=1),
        step=replace(tree(1, 2, root_pages=1, group_pages=1).step, costs="eager"),
    )
    ordered = replace(case, step=replace(case.step, longest_first=False))
    plan = host_plan(ordered.planner(), ordered, page_table(ordered))
    assert plan.num_nodes > 0
    assert bundled(plan)[0] in (0, len(plan.items)), "any item may stand at the end"


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
