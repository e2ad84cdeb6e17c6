# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes found and planned on a GPU: the host planner's bytes, inside graphs, and how long it takes.

The algorithm is tested without a GPU in tests/unit/test_device_forest.py and test_plan_device_shared.py; what
is left is the cluster itself.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from prefix_tables import BATCH, PAGE, SHAPES, serving_planner
from shared_cases import SharedCase, shared_cases
from shared_tables import assert_same_bytes, host_plan, page_table, random_case, tree

from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest

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


class Step:
    """Decode steps in place: the same tensors hold one table after the other."""

    def __init__(self, pages: int) -> None:
        self.planner = serving_planner(pages * PAGE)
        self.starts = torch.arange(BATCH + 1, dtype=torch.int32)
        self.host = torch.zeros(BATCH, pages, dtype=torch.int32)
        self.kv_lens = torch.full((BATCH,), pages * PAGE - 5, dtype=torch.int32)
        self.table = on_device(PageTable.from_block_table(self.host, self.kv_lens, page_size=PAGE))
        self.device_starts = self.starts.cuda()
        self.buffer = torch.zeros(self.planner.layout.total, dtype=torch.uint8, device="cuda")
        self.planner.prepare(self.buffer.device)

    def fill(self, rows: np.ndarray) -> None:
        self.host = torch.from_numpy(np.ascontiguousarray(rows))
        assert self.table.indices is not None
        self.table.indices.copy_(self.host)

    def plan(self) -> None:
        self.planner.plan_on_device(self.device_starts, self.table.kv_lens, self.buffer, self.table)

    def check(self) -> Plan:
        """What was planned is the host's plan of what the table holds now."""
        table = PageTable.from_block_table(self.host, self.kv_lens, page_size=PAGE)
        forest = PrefixForest.of_step(table, self.starts, self.kv_lens, group=4, max_tile=128)
        expected = torch.zeros(self.planner.layout.total, dtype=torch.uint8)
        self.planner.plan(self.starts, self.kv_lens, expected, forest)
        host = Plan(expected.numpy(), self.planner.layout)
        assert_same_bytes(Plan(self.buffer.cpu().numpy(), self.planner.layout), host)
        return host


def capture(step: Step, plans: int) -> torch.cuda.CUDAGraph:
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(plans):
            step.plan()
    return graph


def test_one_graph_serves_tables_of_any_kind() -> None:
    step = Step(256)
    graph = capture(step, 1)
    found = {}
    for name, rows in [*SHAPES.items(), *reversed(SHAPES.items())]:
        step.fill(rows(256))
        graph.replay()
        found[name] = step.check().header["num_nodes"]
    assert found["nothing"] == 0
    assert found["one prompt"] == 1
    assert found["groups"] > 1


def microseconds(step: Step, graph: torch.cuda.CUDAGraph, plans: int) -> float:
    times = []
    for _ in range(50):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / plans)
    return statistics.median(times)


def test_time_of_detection_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """At batch 256; the limits are for an H200. A plan in a graph of twenty, launch included."""
    times: dict[str, float] = {}
    for pages in (256, 2048):
        step = Step(pages)
        graph = capture(step, 20)
        for name, rows in SHAPES.items():
            step.fill(rows(pages))
            times[f"{name} {pages * PAGE // 1024}k"] = microseconds(step, graph, 20)
            step.check()
    with capsys.disabled():
        print("\nmicroseconds a plan with detection:", {name: round(t, 2) for name, t in times.items()})
    if "H200" in torch.cuda.get_device_name():
        assert max(t for name, t in times.items() if name.endswith(" 4k")) <= 15
        assert max(t for name, t in times.items() if name.endswith(" 32k")) <= 30
