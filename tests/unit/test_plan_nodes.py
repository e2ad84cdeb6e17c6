# SPDX-License-Identifier: Apache-2.0
"""How nodes of prefixes are cut, by their own share of the CTAs, and when their items are drawn: first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from native_planner import plan_shared_as_device
from plan_cases import COSTS, PlanCase
from shared_cases import SharedCase
from shared_tables import assert_same_bytes, host_plan, page_table, random_case

from fi_backend.core.plan import PREFIX, Plan
from fi_backend.core.planner import CostModel
from fi_backend.core.sharing import SharingLimits


def decode(groups: int, members: int, prefix: int, own: int, **step: object) -> SharedCase:
    """Groups of decoding requests on an H200; KV tokens of the prompt of each group, and behind it."""
    count = groups * members
    usual = PlanCase((), (), group=4, heads=8, num_ctas=132, costs="cuda", tiles=(16, 128))
    return SharedCase(
        paths=tuple((g,) for g in range(groups) for _ in range(members)),
        run_pages={(g,): prefix // 16 for g in range(groups)},
        q_lens=(1,) * count,
        own=(own,) * count,
        sharing=SharingLimits(groups, 1, count),
        step=replace(usual, **step),
    )


@pytest.fixture(autouse=True)
def fitted_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COSTS, "cuda", CostModel.for_device("cuda"))


def plan_on_both(case: SharedCase) -> Plan:
    """The host's plan, of which the device writes the same bytes."""
    planner, table = case.planner(), page_table(case)
    host = host_plan(planner, case, table)
    assert_same_bytes(plan_shared_as_device(planner, case.plan_case.qo_indptr(), table, "512_8"), host)
    return host


def is_node(plan: Plan) -> np.ndarray:
    return (plan.items["flags"] & PREFIX) > 0


def lengths(items: np.ndarray) -> dict[int, int]:
    """How many items have so many KV tokens."""
    return dict(Counter((items["kv_end"] - items["kv_begin"]).tolist()))


@pytest.mark.parametrize(
    ("case", "nodes", "requests"),
    [
        pytest.param(decode(1, 64, 8192, 256), {1024: 2 * 8}, {256: 64}, id="one prompt, two tiles"),
        pytest.param(decode(4, 16, 4096, 512), {1024: 4 * 4}, {512: 64}, id="groups"),
        pytest.param(
            decode(1, 32, 4096, 4096), {704: 5, 576: 1}, {4096: 32}, id="three times the way of a state"
        ),
        pytest.param(decode(1, 256, 1024, 64), {1024: 8}, {64: 256}, id="whole by the step's budget"),
        pytest.param(decode(1, 64, 1024, 4096), {1024: 2}, {4096: 64}, id="whole beside long requests"),
    ],
)
def test_nodes_that_are_cut_are_cut_by_their_own_share(
    case: SharedCase, nodes: dict[int, int], requests: dict[int, int]
) -> None:
    plan = plan_on_both(case)
    assert lengths(plan.items[is_node(plan)]) == nodes
    assert lengths(plan.items[~is_node(plan)]) == requests


@pytest.mark.parametrize(
    ("groups", "own"), [pytest.param(16, 2048, id="few tickets"), pytest.param(20, 512, id="many tickets")]
)
def test_members_count_the_items_of_all_nodes_above(groups: int, own: int) -> None:
    """A root in three chunks, below it nodes that stay whole, and the last one that is cut."""
    below = {(0, g): 64 for g in range(groups - 1)} | {(0, groups - 1): 1024}
    case = replace(
        decode(groups, 8, 0, own),
        paths=tuple((0, g) for g in range(groups) for _ in range(8)),
        run_pages={(0,): 512} | below,
        sharing=SharingLimits(groups + 1, 2, 16 * groups),
    )
    plan = plan_on_both(case)
    items = plan.items[is_node(plan)]
    of_node = [lengths(items[items["request"] == j]) for j in range(groups + 1)]
    tiles = groups // 4
    assert of_node[0] == {2752: 2 * tiles, 2688: tiles}
    assert of_node[1:groups] == [{1024: 1}] * (groups - 1)
    assert of_node[groups] == {5504: 2, 5376: 1}
    parts = plan.units["parts_end"] - plan.units["parts_begin"]
    assert parts.tolist() == [3 + 1 + 1] * (8 * groups - 8) + [3 + 3 + 1] * 8


def test_nodes_are_never_cut_longer_than_the_steps_budget_says() -> None:
    """A sixteenth more than the nodes' share is more than the share of all, where nodes are nearly all."""
    plan = plan_on_both(decode(1, 256, 4096, 1, costs="eager"))
    assert plan.header["chunk"] == 2016, "by 17/16 of the nodes' share it would be 2112, and two chunks"
    assert lengths(plan.items[is_node(plan)]) == {1376: 8 * 2, 1344: 8}


@pytest.mark.parametrize(
    ("members", "ctas", "nodes"),
    [
        pytest.param(4, 132, {3008: 10, 2688: 1}, id="32 tickets"),
        pytest.param(16, 128, {3648: 8, 3584: 1}, id="128 tickets for 128"),
        pytest.param(16, 127, {2240: 14, 1408: 1}, id="128 tickets for 127"),
        pytest.param(17, 132, {2048: 16}, id="136 tickets"),
    ],
)
def test_nodes_have_a_share_of_their_own_where_requests_have_more_items_than_there_are_ctas(
    members: int, ctas: int, nodes: dict[int, int]
) -> None:
    """Else more items of nodes would make a second wave."""
    plan = plan_on_both(decode(1, members, 32768, 2048, num_ctas=ctas))
    assert lengths(plan.items[is_node(plan)]) == nodes
    assert lengths(plan.items[~is_node(plan)]) == {2048: members}


@pytest.mark.parametrize(
    ("prefix", "own", "chunk", "nodes", "requests"),
    [
        pytest.param(16000, 8000, 4976, {4000: 8}, {4000: 320}, id="by the step's budget, into four"),
        pytest.param(32000, 8000, 5104, {4576: 12, 4544: 2}, {4000: 320}, id="by the step's budget"),
        pytest.param(200000, 100, 12608, {12512: 30, 12320: 2}, {100: 160}, id="by twice the step's budget"),
    ],
)
def test_where_a_plan_does_not_fit_the_steps_budget_cuts_nodes_too(
    prefix: int, own: int, chunk: int, nodes: dict[int, int], requests: dict[int, int]
) -> None:
    """The nodes' own share would give 160 members more than 60 parts each, for which there is no room."""
    plan = plan_on_both(decode(1, 160, prefix, own, group=1, heads=1, costs="eager"))
    assert plan.header["chunk"] == chunk
    assert lengths(plan.items[is_node(plan)]) == nodes
    assert lengths(plan.items[~is_node(plan)]) == requests


@pytest.mark.parametrize(
    ("case", "chunk"),
    [
        (decode(1, 8, 8192, 512), 960),
        (decode(1, 16, 4096, 1024), 704),
        (decode(4, 16, 2048, 256), 1728),
        (decode(2, 8, 8192, 4096), 2496),
    ],
)
def test_budgets_are_compared_without_the_nodes_own(case: SharedCase, chunk: int) -> None:
    """With estimates of the nodes' shorter items other budgets would be chosen than before there were any."""
    assert plan_on_both(case).header["chunk"] == chunk


def in_order_of_drawing(plan: Plan, longest_first: bool) -> list[tuple[int, ...]]:
    """Keys of the items by which they are sorted."""
    items = plan.items
    step = max(0, int(items["cost"].max(initial=0)).bit_length() - 8)
    return [
        (
            node != longest_first,
            0 if node or not longest_first else -min(254, int(i["cost"]) >> step),
            int(i["request"]),
            int(i["q_begin"]),
            int(i["kv_begin"]),
        )
        for i, node in zip(items, is_node(plan).tolist(), strict=True)
    ]


@pytest.mark.parametrize("longest_first", [True, False])
def test_items_of_nodes_are_drawn_first_and_in_their_order(longest_first: bool) -> None:
    """Unless nothing is reordered: then they stand behind those of the requests."""
    composed = cheaper = 0
    for seed in range(60):
        case = random_case(seed)
        case = replace(case, step=replace(case.step, longest_first=longest_first))
        plan = host_plan(case.planner(), case, page_table(case))
        keys = in_order_of_drawing(plan, longest_first)
        assert keys == sorted(keys)
        composed += plan.num_nodes > 0
        costs, node = plan.items["cost"], is_node(plan)
        cheaper += node.any() and not node.all() and costs[node].min() < costs[~node].max()
    assert composed > 30
    assert cheaper > 30


@pytest.mark.parametrize("own", [4096, pytest.param(3670, id="of the greatest cost that a bucket has")])
def test_a_node_is_drawn_before_requests_that_cost_more(own: int) -> None:
    plan = plan_on_both(decode(1, 64, 1024, own))
    assert is_node(plan).tolist() == [True] * 2 + [False] * 64
    assert plan.items["cost"][0] < plan.items["cost"][-1]
    late = plan_on_both(decode(1, 64, 1024, 4096, longest_first=False))
    assert is_node(late).tolist() == [False] * 64 + [True] * 2
