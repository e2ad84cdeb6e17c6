# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes on the device, emulated: the host's forests, and the host planner's bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import event, given
from hypothesis import strategies as st
from native_planner import plan_as_device, plan_shared_as_device
from shared_cases import SharedCase, shared_cases
from shared_tables import assert_same_bytes, host_plan, page_table, random_case, tree

from fi_backend.core.plan import PLAN_MAGIC, Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec


def assert_same_plan(
    case: SharedCase, blocks: str = "128_3", seed: int = 1, limits: torch.Tensor | None = None
) -> Plan:
    planner, table = case.planner(), page_table(case)
    host = host_plan(planner, case, table, limits)
    qo_indptr = case.plan_case.qo_indptr()
    assert_same_bytes(plan_shared_as_device(planner, qo_indptr, table, blocks, seed, limits), host)
    return host


cases = shared_cases(max_requests=24).map(lambda c: replace(c, step=replace(c.step, planned_queues=False)))


seeds = st.integers(0, 2**31 - 1)


@share(100)
@given(cases, seeds, st.booleans())
def test_bytes_equal_the_hosts(case: SharedCase, seed: int, longest_first: bool) -> None:
    assert_same_plan(replace(case, step=replace(case.step, longest_first=longest_first)), seed=seed)


@share(200)
@given(seeds)
def test_bytes_equal_the_hosts_where_much_is_shared(seed: int) -> None:
    event(f"{assert_same_plan(random_case(seed), seed=seed).header['num_nodes']} nodes")


STEPS = {
    "a batch of decode steps": tree(32, 8, root_pages=250, group_pages=40),
    "few tickets": tree(2, 4, root_pages=700, group_pages=300),
    "few tickets that are quicker flat": tree(2, 2, root_pages=3, group_pages=2, costs="coarse"),
    "members that straddle tiles": tree(3, 11, root_pages=90, group_pages=20, q_len=5, group=5, heads=2),
    "more tiles than fit shared memory": tree(3, 200, root_pages=20, group_pages=20, q_len=2, group=8),
    "many nodes": tree(200, 2, root_pages=40, group_pages=30),
    "more nodes than there is room for": replace(
        tree(200, 2, root_pages=40, group_pages=30), sharing=SharingLimits(150, 8, 4096)
    ),
    "more requests than are looked at": tree(2, 600, root_pages=9, group_pages=5, heads=1),
}


@pytest.mark.parametrize("blocks", ["128_3", "512_1"])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_steps_of_any_size(case: SharedCase, blocks: str) -> None:
    assert_same_plan(case, blocks)


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_steps_of_any_size_in_the_order_of_the_requests(case: SharedCase) -> None:
    unordered = replace(case, step=replace(case.step, longest_first=False))
    plan, ordered = assert_same_plan(unordered), assert_same_plan(case)
    np.testing.assert_array_equal(np.sort(plan.items), np.sort(ordered.items))
    np.testing.assert_array_equal(plan.units, ordered.units)


def test_the_steps_are_what_their_names_say() -> None:
    assert assert_same_plan(STEPS["a batch of decode steps"]).header["num_nodes"] == 33
    assert assert_same_plan(STEPS["many nodes"]).header["num_nodes"] == 201
    assert assert_same_plan(STEPS["more nodes than there is room for"]).header["num_nodes"] == 150
    assert assert_same_plan(STEPS["few tickets that are quicker flat"]).header["num_nodes"] == 0


@share(50)
@given(cases, st.data())
def test_limits_of_the_caller(case: SharedCase, data: st.DataObject) -> None:
    draw = st.sampled_from((0, 1, case.page_size, 5 * case.page_size + 1, 2**31 - 1))
    limits = torch.tensor([data.draw(draw) for _ in case.paths], dtype=torch.int32)
    assert_same_plan(case, limits=limits)


def test_without_anything_shared_the_plan_is_the_flat_one() -> None:
    case = SharedCase(paths=((),) * 9, run_pages={}, q_lens=(1,) * 9, own=tuple(range(100, 1000, 100)))
    planner = case.planner()
    device = plan_shared_as_device(planner, case.plan_case.qo_indptr(), page_table(case), "128_3", 3)
    assert device.tobytes() == case.plan_case.plan(planner).tobytes()


def test_a_planner_with_room_for_sharing_plans_flat_steps() -> None:
    case = tree(3, 200, root_pages=20, group_pages=20)
    planner, qo_indptr = case.planner(), case.plan_case.qo_indptr()
    device = plan_as_device(planner, qo_indptr, torch.tensor(case.kv_lens, dtype=torch.int32), 512)
    assert device.tobytes() == case.plan_case.plan(planner).tobytes()


def test_bad_lengths_give_a_plan_without_items() -> None:
    case = tree(2, 4, root_pages=20, group_pages=20)
    planner, table = case.planner(), page_table(case)
    table.kv_lens[3] = -1
    plan = plan_shared_as_device(planner, case.plan_case.qo_indptr(), table, "128_3", 1)
    assert plan.header["magic"] == PLAN_MAGIC
    assert plan.header["num_items"] == plan.header["num_nodes"] == 0


def wrong(planner: Planner, case: SharedCase, match: str, **fields: object) -> None:
    with pytest.raises(ValueError, match=match):
        plan_shared_as_device(
            planner, case.plan_case.qo_indptr(), replace(page_table(case), **fields), "128_3", 1
        )


def test_refusals() -> None:
    case = tree(2, 4, root_pages=20, group_pages=20)
    flat = case.plan_case.planner(page_size=case.page_size)
    wrong(flat, case, r"^detect_prefixes: expected a planner with room for shared prefixes; got none")
    wrong(case.planner(), case, r"^index_step: expected >= 1; got 0", index_step=0)
    wrong(case.planner(), case, r"^row_end: ", row_end=torch.zeros(3, dtype=torch.int64))


def test_costs_beyond_32_bits_are_refused_at_construction() -> None:
    spec, limits = AttentionSpec(8, 2, 64), Limits(4, 4, 64)

    def planner(beta: int, sharing: SharingLimits | None) -> Planner:
        return Planner(spec, limits, num_ctas=4, costs=CostModel(beta=(4, 4, 4, 4, beta)), sharing=sharing)

    planner(2**20, SharingLimits(1, 1, 1))
    planner(2**31 - 1, None)
    with pytest.raises(ValueError, match=r"^costs.beta: expected at most 1048576 .*; got .*1048577.*Scale"):
        planner(2**20 + 1, SharingLimits(1, 1, 1))
