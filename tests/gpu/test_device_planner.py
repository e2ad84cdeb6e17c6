# SPDX-License-Identifier: Apache-2.0
"""The device planner on a GPU: the host planner's bytes, inside graphs, and how long a plan takes.

Its algorithm is tested without a GPU in tests/unit/test_plan_device.py; what is left is the block itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import example, given
from plan_cases import PlanCase, cases

from fi_backend.benchmarks.cuda.plan_time import graph_timer, planner_for_steps, time_device_planning
from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner

pytestmark = pytest.mark.gpu
FAULT_KV_LENS = 1 << 10


def fetch(planner: Planner, buffer: torch.Tensor) -> Plan:
    return Plan(buffer.cpu().numpy(), planner.layout)


def counters(planner: Planner, plan: Plan) -> np.ndarray:
    begin = planner.layout.counters
    return plan.buffer[begin : begin + 4 * planner.capacity[-1]].view(np.int32)


def assert_same_plan(planner: Planner, plan: Plan, qo_indptr: torch.Tensor, kv_lens: torch.Tensor) -> None:
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)
    planner.plan(qo_indptr, kv_lens, buffer)
    host = Plan(buffer.numpy(), planner.layout)
    assert plan.header == host.header
    for name in ("units", "parts", "kv_len_bounds", "items"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(host, name), err_msg=name)
    assert plan.tobytes() == host.tobytes()
    assert not counters(planner, plan).any()


@share(300)
@given(cases(max_requests=300, max_kv=100_000).filter(lambda case: not case.planned_queues))
@example(PlanCase((1,), (2_000_000,), num_ctas=264, invariant=True, group=3, heads=2))
@example(PlanCase((1,) * 50, (2**31 - 1,) * 50, num_ctas=1, heads=8, invariant=True, window_left=5))
@example(PlanCase((1,) * 1500, tuple(range(1500)), num_ctas=132))
@example(PlanCase((9000, 1, 0, 500), (9000, 70_000, 3, 40_000), group=32, num_ctas=132))
@example(PlanCase((9000, 1, 0, 500), (9000, 70_000, 3, 40_000), group=32, num_ctas=132, invariant=True))
@example(PlanCase((1,), (10**7,), num_ctas=2000, costs="fine"))
@example(PlanCase((), (), num_ctas=2))
@example(PlanCase((1,) * 256, tuple(100 * i for i in range(256)), group=4, heads=8, num_ctas=132))
def test_bytes_equal_the_hosts(case: PlanCase) -> None:
    check(case)


@pytest.mark.parametrize("requests", [1, 256, 1500])
def test_bytes_equal_the_hosts_without_lpt(requests: int) -> None:
    lens = tuple(7919 * i % 9000 for i in range(1, requests + 1))
    case = PlanCase((1,) * requests, lens, group=4, heads=8, num_ctas=132, longest_first=False)
    check(case)
    check(replace(case, q_lens=(400, *case.q_lens[1:])))


def check(case: PlanCase) -> None:
    planner = case.planner()
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    buffer = torch.full((planner.layout.total,), 0xA5, dtype=torch.uint8, device="cuda")
    planner.plan_on_device(case.qo_indptr().cuda(), kv_lens.cuda(), buffer)
    assert_same_plan(planner, fetch(planner, buffer), case.qo_indptr(), kv_lens)


STEPS = {
    "decode": ([1] * 64, [100 * i for i in range(64)]),
    "mixed": ([1] * 60 + [700, 3, 0, 1500], [4000] * 60 + [900, 3, 5, 90_000]),
    "idle": ([0] * 64, [0] * 64),
    "prefill": ([128] * 64, [128 + 7 * i for i in range(64)]),
    "skewed": ([1] * 64, [131072] + [1] * 63),
}


def test_one_graph_serves_steps_of_any_kind() -> None:
    planner = planner_for_steps()
    starts = torch.zeros(65, dtype=torch.int32, device="cuda")
    kv_lens = torch.zeros(64, dtype=torch.int32, device="cuda")
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8, device="cuda")
    planner.prepare(buffer.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        planner.plan_on_device(starts, kv_lens, buffer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.graph(graph):
        planner.plan_on_device(starts, kv_lens, buffer)
    for q, kv in [*STEPS.values(), *reversed(STEPS.values())]:
        host_starts = torch.tensor(np.cumsum([0, *q]), dtype=torch.int32)
        host_lens = torch.tensor(kv, dtype=torch.int32)
        starts.copy_(host_starts)
        kv_lens.copy_(host_lens)
        graph.replay()
        assert_same_plan(planner, fetch(planner, buffer), host_starts, host_lens)


def test_bad_lengths_set_a_fault_and_the_next_plan_clears_it() -> None:
    planner = planner_for_steps()
    starts = torch.arange(5, dtype=torch.int32)
    buffer = torch.full((planner.layout.total,), 0xA5, dtype=torch.uint8, device="cuda")
    for length, fault in ((131073, FAULT_KV_LENS), (-1, FAULT_KV_LENS), (9, 0)):
        kv_lens = torch.tensor([5, length, 7, 131072], dtype=torch.int32)
        planner.plan_on_device(starts.cuda(), kv_lens.cuda(), buffer)
        plan = fetch(planner, buffer)
        assert counters(planner, plan)[1] == fault
        if fault:
            assert plan.header["num_items"] == plan.header["num_tokens"] == 0
        else:
            assert_same_plan(planner, plan, starts, kv_lens)


def test_the_current_stream_is_used() -> None:
    """Lengths that another stream is about to write must be seen by a plan queued behind that write."""
    planner = planner_for_steps()
    starts, buffer = (
        torch.arange(257, dtype=torch.int32),
        torch.zeros(planner.layout.total, dtype=torch.uint8),
    )
    kv_lens = torch.arange(1, 257, dtype=torch.int32) * 50
    device_starts, device_lens, buffer = starts.cuda(), torch.zeros_like(kv_lens).cuda(), buffer.cuda()
    planner.prepare(buffer.device)
    source = kv_lens.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        device_lens.copy_(source)
        planner.plan_on_device(device_starts, device_lens, buffer)
    torch.cuda.synchronize()
    assert_same_plan(planner, fetch(planner, buffer), starts, kv_lens)


def test_tensors_of_the_host_are_refused() -> None:
    planner = planner_for_steps()
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8, device="cuda")
    lens = torch.ones(4, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"^qo_indptr: expected a tensor in cuda:0; got one in host memory"):
        planner.plan_on_device(torch.arange(5, dtype=torch.int32), lens, buffer)
    with pytest.raises(ValueError, match=r"^plan buffer: expected a tensor in cuda:0"):
        planner.plan_on_device(torch.arange(5, dtype=torch.int32).cuda(), lens, buffer.cpu())
    with pytest.raises(ValueError, match=r"^plan buffer: expected \d+ bytes; got 100"):
        planner.plan_on_device(torch.arange(5, dtype=torch.int32).cuda(), lens, buffer[:100])


def test_time_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is for an H200 at batch 256; a step waits for its plan."""
    device = torch.device("cuda", torch.cuda.current_device())
    rows = list(time_device_planning(device, torch.cuda.get_device_name(), graph_timer(device)))
    with capsys.disabled():
        print("\nmicroseconds a plan:", {f"{row.step} {row.batch}": row.median_us for row in rows})
    assert [row for row in rows if row.failed] == []
