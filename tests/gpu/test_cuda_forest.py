# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes found and planned on a GPU: the host planner's bytes, inside graphs, and how long it takes.

The algorithm is tested without a GPU in tests/unit/test_device_forest.py and test_plan_device_shared.py; what
is left is the cluster itself.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from shared_cases import SharedCase, shared_cases
from shared_tables import assert_same_bytes, host_plan, page_table, random_case, tree

from fi_backend.adapters.host_plan import copy_lengths
from fi_backend.benchmarks.cuda.plan_time import DeviceStep, graph_timer, shared_step, time_device_planning
from fi_backend.benchmarks.shared_tables import PAGE, SHAPES
from fi_backend.core.host_table import pages_on_host
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step import Step

pytestmark = pytest.mark.gpu


def on_device(table: PageTable) -> PageTable:
    assert table.indices is not None
    return PageTable(
        table.indices.cuda(),
        table.row_begin.cuda(),
        table.row_end.cuda(),
        table.kv_lens.cuda(),
        table.page_size,
        table.index_step,
        table.index_divisor,
    )


def plan_on_device(
    planner: Planner, qo_indptr: torch.Tensor, table: PageTable, limits: torch.Tensor | None = None
) -> Plan:
    buffer = torch.full((planner.layout.total,), 0xA5, dtype=torch.uint8, device="cuda")
    there = on_device(table)
    planner.plan_on_device(
        qo_indptr.cuda(), there.kv_lens, buffer, there, None if limits is None else limits.cuda()
    )
    return Plan(buffer.cpu().numpy(), planner.layout)


def assert_same_plan(case: SharedCase, limits: torch.Tensor | None = None) -> Plan:
    planner, table = case.planner(), page_table(case)
    host = host_plan(planner, case, table, limits)
    assert_same_bytes(plan_on_device(planner, case.plan_case.qo_indptr(), table, limits), host)
    return host


@share(200)
@given(st.integers(0, 2**31 - 1))
def test_bytes_equal_the_hosts_where_much_is_shared(seed: int) -> None:
    assert_same_plan(random_case(seed, requests=300))


@share(100)
@given(shared_cases(max_requests=24).filter(lambda case: not case.step.planned_queues), st.data())
def test_bytes_equal_the_hosts(case: SharedCase, data: st.DataObject) -> None:
    draw = st.sampled_from((0, 5 * case.page_size + 1, 2**31 - 1))
    assert_same_plan(case, torch.tensor([data.draw(draw) for _ in case.paths], dtype=torch.int32))


@pytest.mark.parametrize(
    "case",
    [
        tree(32, 8, root_pages=250, group_pages=40),
        tree(3, 200, root_pages=20, group_pages=20, q_len=2, group=8),
        tree(200, 2, root_pages=40, group_pages=30),
        tree(500, 2, root_pages=40, group_pages=30, heads=1),
        tree(2, 600, root_pages=9, group_pages=5, heads=1),
        tree(1, 7, root_pages=9000, group_pages=500),
    ],
    ids=["groups", "many tiles", "many nodes", "a thousand requests", "more than are looked at", "long rows"],
)
def test_steps_of_any_size(case: SharedCase) -> None:
    assert assert_same_plan(case).header["num_nodes"] > 0


def test_what_is_copied_to_the_host_gives_the_devices_plan() -> None:
    """As under FI_BACKEND_WITHOUT=device_plan, and as a step that is saved."""
    case = tree(32, 8, root_pages=250, group_pages=40)
    planner, there = case.planner(), on_device(page_table(case))
    qo_indptr = case.plan_case.qo_indptr()
    lengths = copy_lengths(qo_indptr.cuda(), there.kv_lens)
    pages = pages_on_host(there, lengths.kv_lens)
    assert pages is not None
    copied = PageTable.from_block_table(pages, lengths.kv_lens, page_size=case.page_size)
    assert_same_bytes(plan_on_device(planner, qo_indptr, there), host_plan(planner, case, copied))
    spec = AttentionSpec(32, 8, 64, page_size=case.page_size)
    step = Step.capture(spec, qo_indptr.cuda(), there)
    assert (step.block_table, step.kv_lens.tolist()) == (case.rows(), list(case.kv_lens))


def capture(step: DeviceStep) -> torch.cuda.CUDAGraph:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.plan()
    return graph


def test_one_graph_serves_tables_of_any_kind() -> None:
    step = shared_step(256 * PAGE, torch.device("cuda", torch.cuda.current_device()))
    graph = capture(step)
    found = {}
    for name, rows in [*SHAPES.items(), *reversed(SHAPES.items())]:
        step.fill(torch.from_numpy(np.ascontiguousarray(rows(256))))
        graph.replay()
        host = step.expected()
        assert_same_bytes(step.planned(), host)
        found[name] = host.header["num_nodes"]
    assert found["nothing"] == 0
    assert found["one prompt"] == 1
    assert found["groups"] > 1


def test_time_of_detection_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """At batch 256; the limits are for an H200. A plan in a graph of twenty, launch included."""
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name()
    rows = list(time_device_planning(device, gpu, graph_timer(device), shared=True))
    with capsys.disabled():
        times = {f"{row.step} {row.context // 1000}k": row.median_us for row in rows}
        print("\nmicroseconds a plan with detection:", times)
    assert [row for row in rows if row.failed] == []
