# SPDX-License-Identifier: Apache-2.0
"""Steps of many tickets, which the device plans in a way of its own unless a request's tile is cut.

Nodes are cut, requests are not, in any mix: the bytes are the host's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from examples import share
from hypothesis import event, given
from hypothesis import strategies as st
from native_planner import plan_shared_as_device
from plan_cases import COSTS, PlanCase
from shared_cases import SharedCase
from shared_tables import assert_same_bytes, host_plan, page_table, tree

from fi_backend.core.plan import Plan
from fi_backend.core.sharing import SharingLimits

seeds = st.integers(0, 2**31 - 1)


def many_tickets(seed: int) -> SharedCase:
    """Decode steps on few CTAs: large prompts are cut, and in some steps the rows of a long request too."""
    rng = np.random.default_rng(seed)
    branching, depth = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    count = int(rng.integers(9, 60))
    paths = tuple(
        tuple(map(int, rng.integers(0, branching, rng.integers(0, depth + 1)))) for _ in range(count)
    )
    runs = sorted({path[: i + 1] for path in paths for i in range(len(path))})
    own = rng.integers(1, int(rng.choice((5, 300))), count)
    if rng.integers(0, 3) == 0:
        own[rng.integers(0, count)] = 30_000
    return SharedCase(
        paths=paths,
        run_pages={run: int(rng.choice((2, 30, 1500))) for run in runs},
        q_lens=(1,) * count,
        own=tuple(map(int, own)),
        sharing=SharingLimits(512, 8, 4096),
        step=PlanCase(
            (),
            (),
            group=int(rng.choice((1, 2, 4, 6))),
            heads=8,
            num_ctas=int(rng.integers(1, 1 + min(count, 32))),
            costs=str(rng.choice(("eager", "fine"))),
            tiles=((1, 128), (16, 128), (16, 32))[rng.integers(0, 3)],
        ),
    )


def kinds(plan: Plan) -> tuple[bool, bool]:
    """Whether a node is cut, and whether a request's own or only tile is."""
    node = plan.items["flags"] & 4 > 0
    nodes, requests = plan.items["request"][node], plan.items["request"][~node]
    spans = np.stack([nodes, plan.items["kv_begin"][node]])
    return len(np.unique(spans, axis=1).T) > len(np.unique(nodes)), len(np.unique(requests)) < len(requests)


def assert_same_plan(case: SharedCase, blocks: str, seed: int) -> Plan:
    planner, table = case.planner(), page_table(case)
    host = host_plan(planner, case, table)
    plan = plan_shared_as_device(planner, case.plan_case.qo_indptr(), table, blocks, seed)
    assert_same_bytes(plan, host)
    return host


@share(120)
@given(seeds)
def test_bytes_equal_the_hosts(seed: int) -> None:
    plan = assert_same_plan(many_tickets(seed), "128_3", seed)
    event(f"{plan.header['num_nodes'] > 0} nodes, (nodes, requests) cut: {kinds(plan)}")


PROMPT = replace(tree(1, 100, root_pages=0, group_pages=2000), paths=((0,),) * 100, run_pages={(0,): 2000})


@pytest.mark.parametrize("blocks", ["128_3", "512_8", "512_1"])
def test_one_prompt_that_is_cut(blocks: str) -> None:
    plan = assert_same_plan(replace(PROMPT, step=replace(PROMPT.step, num_ctas=100)), blocks, 1)
    assert kinds(plan) == (True, False)


@pytest.mark.parametrize("blocks", ["128_3", "512_8"])
def test_a_request_that_is_cut(blocks: str) -> None:
    """What was believed does not hold, and is looked at again."""
    own = (*PROMPT.own[:-1], 100_000)
    plan = assert_same_plan(replace(PROMPT, own=own, step=replace(PROMPT.step, num_ctas=100)), blocks, 1)
    assert kinds(plan) == (True, True)


def test_costs_that_are_added_up_in_larger_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of the greatest costs within the limits would leave 64 bits: no budget is known early."""
    monkeypatch.setitem(COSTS, "heavy", replace(COSTS["eager"], beta=(2**20,) * 5))
    case = replace(PROMPT, run_pages={(0,): 4}, own=(10,) * 100)
    limit = (0, 0, 2**31 - 1 - max(case.kv_lens))
    case = replace(case, step=replace(case.step, num_ctas=100, costs="heavy", spare=limit))
    plan = assert_same_plan(case, "512_8", 1)
    assert plan.header["num_nodes"] == 1
    assert kinds(plan) == (False, False)


def test_members_are_counted_again_where_a_request_is_cut() -> None:
    """Between members of a node lie 32 requests that are none: what was counted of them must be forgotten."""
    paths = tuple((int(32 <= i < 64),) for i in range(100))
    two = replace(PROMPT, paths=paths, run_pages={(0,): 2000, (1,): 2000}, own=(*PROMPT.own[:-1], 100_000))
    plan = assert_same_plan(replace(two, step=replace(two.step, num_ctas=100)), "128_3", 1)
    assert plan.header["num_nodes"] == 2
    assert kinds(plan) == (True, True)


@pytest.mark.parametrize(
    ("blocks", "requests", "members", "num_ctas", "room", "parts"),
    [
        pytest.param("512_8", 170, 120, 20, SharingLimits(1, 1, 120), 11, id="parts of the plan, cut anew"),
        pytest.param("512_8", 170, 128, 21, SharingLimits(512, 8, 4096), 21, id="parts that are gathered"),
        pytest.param("128_3", 124, 30, 15, SharingLimits(512, 8, 4096), 15, id="items, one a thread"),
    ],
)
def test_nodes_whose_chunks_are_more_than_there_is_room_for(
    blocks: str, requests: int, members: int, num_ctas: int, room: SharingLimits, parts: int
) -> None:
    """parts: of each member, nearly one for each CTA unless the plan has no room for them."""
    paths = ((0,),) * members + ((),) * (requests - members)
    step = replace(PROMPT.step, group=1, heads=1, num_ctas=num_ctas)
    ones = (1,) * requests
    case = replace(PROMPT, paths=paths, q_lens=ones, own=(20,) * requests, sharing=room, step=step)
    plan = assert_same_plan(case, blocks, 1)
    assert plan.header["num_parts"] == parts * members
    assert kinds(plan) == (True, False)


def test_a_flat_request_that_is_cut() -> None:
    lens = (*range(100, 195), 200_000)
    flat = SharedCase(paths=((),) * 96, run_pages={}, q_lens=(1,) * 96, own=lens, step=PROMPT.step)
    plan = assert_same_plan(replace(flat, step=replace(flat.step, num_ctas=96)), "128_3", 1)
    assert kinds(plan) == (False, True)
