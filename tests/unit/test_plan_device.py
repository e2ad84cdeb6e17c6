# SPDX-License-Identifier: Apache-2.0
"""The device planner writes the host planner's bytes; its source runs here on an emulated thread block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import example, given
from hypothesis import strategies as st
from native_planner import plan_as_device
from plan_cases import COSTS, MIXED, PlanCase, cases

from fi_backend.core.plan import PLAN_MAGIC, PLAN_VERSION, Plan
from fi_backend.core.planner import Limits, Planner
from fi_backend.core.spec import AttentionSpec


def zeros(planner: Planner) -> bytes:
    return bytes(4 * planner.capacity[-1])


def counters(planner: Planner, plan: Plan) -> bytes:
    begin = planner.layout.counters
    return plan.buffer[begin : begin + 4 * planner.capacity[-1]].tobytes()


def assert_same_plan(case: PlanCase, threads: int, seed: int = 1) -> None:
    planner = case.planner()
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    device = plan_as_device(planner, case.qo_indptr(), kv_lens, threads, seed)
    host = case.plan(planner)
    assert device.header == host.header
    for name in ("units", "parts", "kv_len_bounds", "items"):
        np.testing.assert_array_equal(getattr(device, name), getattr(host, name), err_msg=name)
    assert device.tobytes() == host.tobytes()
    assert counters(planner, device) == zeros(planner)


steps = cases(max_requests=40, max_kv=60_000).filter(lambda case: not case.planned_queues)


@share(300)
@given(steps, st.integers(0, 2**31 - 1), st.booleans())
@example(PlanCase((1,), (2_000_000,), num_ctas=264), 1, True)
@example(PlanCase((1,), (2_000_000,), num_ctas=264, invariant=True, group=3, heads=2), 2, False)
@example(PlanCase((1,), (1_000_000,), num_ctas=264, heads=8, invariant=True, costs="fine"), 3, True)
@example(PlanCase((1,) * 50, (2**31 - 1,) * 50, num_ctas=1, heads=8), 4, False)
@example(PlanCase((1,) * 50, (2**31 - 1,) * 50, num_ctas=1, heads=8, invariant=True, window_left=5), 5, True)
@example(PlanCase((1, 1), (1, 2**31 - 1), num_ctas=264), 6, False)
@example(PlanCase((4096,), (100_000,), group=64, num_ctas=132), 7, True)
@example(PlanCase((), (), num_ctas=2), 8, False)
@example(PlanCase((0, 0), (5, 0), num_ctas=2), 9, True)
def test_bytes_equal_the_hosts(case: PlanCase, seed: int, longest_first: bool) -> None:
    assert_same_plan(replace(case, longest_first=longest_first), 128, seed)


@share(15)
@given(steps, st.integers(0, 2**31 - 1), st.booleans())
@example(PlanCase((1,) * 256, tuple(range(1, 257)), group=4, heads=8, num_ctas=132), 1, True)
@example(PlanCase((1,) * 256, tuple(100 * i for i in range(256)), heads=1, num_ctas=132), 2, False)
@example(replace(MIXED, q_lens=(2048, *MIXED.q_lens[1:])), 3, True)
@example(replace(MIXED, q_lens=(2048, *MIXED.q_lens[1:]), num_ctas=12), 4, True)
@example(replace(MIXED, q_lens=(9000, *MIXED.q_lens[1:]), kv_lens=(70_000, *MIXED.kv_lens[1:])), 5, True)
def test_bytes_equal_the_hosts_in_a_block_of_full_size(
    case: PlanCase, seed: int, longest_first: bool
) -> None:
    assert_same_plan(replace(case, longest_first=longest_first), 512, seed)


@pytest.mark.parametrize("seed", range(12))
def test_a_budget_that_is_doubled_reaches_all_warps(seed: int) -> None:
    """States of grid chunks outgrow the capacity until items are long enough."""
    case = PlanCase((1,) * 100, (20_000,) * 100, group=4, num_ctas=528, invariant=True, costs="fine")
    assert_same_plan(case, 128, seed)


LARGE = {
    "more requests than fit shared memory": PlanCase((1,) * 1500, tuple(range(1500)), heads=1, num_ctas=132),
    "more tiles": PlanCase((9000, 1, 0, 500), (9000, 70_000, 3, 40_000), group=32, num_ctas=132),
    "exactly what fits": PlanCase((1,) * 1024, tuple(7 * i % 9000 for i in range(1024)), num_ctas=264),
    "thousands of items of one tile": PlanCase((1,), (10**7,), num_ctas=2000, costs="fine"),
    "a small step under wide limits": PlanCase((1, 40), (900, 80), num_ctas=132, spare=(3000, 9000, 5)),
}


@pytest.mark.parametrize("threads", [128, 512])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_steps_of_any_size(case: PlanCase, invariant: bool, threads: int) -> None:
    assert_same_plan(PlanCase(**{**vars(case), "invariant": invariant}), threads)


@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_steps_of_any_size_in_the_order_of_the_requests(case: PlanCase) -> None:
    assert_same_plan(replace(case, longest_first=False), 512)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STARTS, TOKENS, KV_LENS = 1 << 8, 1 << 9, 1 << 10
BAD_STEPS = {
    "decreasing": (int32(0, 5, 3), int32(9, 9), STARTS),
    "negative start": (int32(-2, 1, 3), int32(9, 9), STARTS),
    "negative start of nothing": (int32(-2), int32(), STARTS),
    "too many tokens": (int32(0, 33, 33), int32(9, 9), TOKENS),
    "too many tokens together": (int32(0, 20, 40), int32(9, 9), TOKENS),
    "difference beyond int32": (int32(-(2**31), 2**31 - 1, 2**31 - 1), int32(9, 9), STARTS | TOKENS),
    "greatest": (int32(0, 2**31 - 1, 2**31 - 1), int32(9, 9), TOKENS),
    "negative length": (int32(0, 1, 2), int32(9, -1), KV_LENS),
    "too long": (int32(0, 1, 2), int32(1001, 9), KV_LENS),
    "everything": (int32(0, 40, 3), int32(2**31 - 1, -(2**31)), STARTS | TOKENS | KV_LENS),
}


@pytest.mark.parametrize(("qo_indptr", "kv_lens", "fault"), BAD_STEPS.values(), ids=BAD_STEPS)
def test_bad_lengths_give_a_plan_without_items_and_a_fault(
    qo_indptr: torch.Tensor, kv_lens: torch.Tensor, fault: int
) -> None:
    planner = Planner(AttentionSpec(8, 2, 64), Limits(4, 32, 1000), num_ctas=8, costs=COSTS["gpu"])
    plan = plan_as_device(planner, qo_indptr, kv_lens, 128)
    assert (plan.header["magic"], plan.header["version"]) == (PLAN_MAGIC, PLAN_VERSION)
    assert plan.header["num_items"] == plan.header["num_units"] == plan.header["num_tokens"] == 0
    assert plan.header["num_requests"] == len(kv_lens)
    words = np.frombuffer(counters(planner, plan), np.int32)
    assert words[1] == fault
    assert not words[[0, *range(2, len(words))]].any()
    sections = np.ones(planner.layout.total, bool)
    for begin, size in (
        (planner.layout.header, 128),
        (planner.layout.kv_len_bounds, 4 * len(kv_lens)),
        (planner.layout.counters, 4 * planner.capacity[-1]),
    ):
        sections[begin : begin + size] = False
    assert (plan.buffer[sections] == 0xA5).all(), "nothing else is written"


def test_planned_queues_need_host_lengths() -> None:
    planner = PlanCase((1,), (9,), planned_queues=True).planner()
    with pytest.raises(ValueError, match=r"^planned_queues: expected False .* Pass qo_indptr_host"):
        plan_as_device(planner, int32(0, 1), int32(9), 128)


def test_more_requests_than_planned_for() -> None:
    planner = PlanCase((1,), (9,)).planner()
    with pytest.raises(ValueError, match=r"^kv_lens: expected at most max_requests = 1 requests; got 2"):
        plan_as_device(planner, int32(0, 1, 2), int32(9, 9), 128)
