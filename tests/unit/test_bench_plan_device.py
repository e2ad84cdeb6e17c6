# SPDX-License-Identifier: Apache-2.0
"""`bench plan --device cuda` without a GPU: what is planned, limits, and plans that are not the host's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fi_backend.benchmarks.cuda import plan_time
from fi_backend.benchmarks.cuda.plan_time import (
    PLANS,
    DevicePlanTiming,
    DeviceStep,
    flat_steps,
    shared_step,
    time_device_planning,
)
from fi_backend.benchmarks.shared_tables import BATCH, PAGE, SHAPES
from fi_backend.cli import bench_cuda
from fi_backend.cli.main import app
from fi_backend.core.page_table import PageTable
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def planned_by_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the host plan where a device would; the list counts plans."""
    plans = [0]

    def plan(
        self: Planner,
        qo_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        buffer: torch.Tensor,
        table: PageTable | None = None,
    ) -> None:
        plans[0] += 1
        forest = table and PrefixForest.of_step(table, qo_indptr, kv_lens, group=4, max_tile=128)
        self.plan(qo_indptr, kv_lens, buffer, forest)

    monkeypatch.setattr(Planner, "plan_on_device", plan)
    monkeypatch.setattr(Planner, "prepare", lambda *_: None)
    return plans


def timer(us: float) -> Callable[[Callable[[], torch.Tensor]], list[float]]:
    def times(step: Callable[[], torch.Tensor]) -> list[float]:
        step()
        return [us - 1, us, us + 1]

    return times


def rows(gpu: str, us: float, *, shared: bool) -> list[DevicePlanTiming]:
    return list(time_device_planning(CPU, gpu, timer(us), shared=shared))


def test_steps_of_every_batch_size(planned_by_the_host: list[int]) -> None:
    found = rows("NVIDIA H200", 7.5, shared=False)
    assert planned_by_the_host[0] == PLANS * len(found)
    assert [(row.step, row.batch) for row in found] == [
        *((name, batch) for batch in (16, 64, 256, 1024) for name in ("even", "uneven", "skewed")),
        ("mixed", 203),
    ]
    limits = {row.batch: row.limit_us for row in found}
    assert limits == {16: None, 64: None, 256: 8.0, 1024: None, 203: None}
    for row in found:
        assert (row.where, row.median_us, row.p10_us, row.p90_us) == ("device", 7.5, 6.7, 8.3)
        assert (row.calls, row.prefix_nodes, row.failed) == (3 * PLANS, 0, "")
        assert row.items >= row.batch
    assert {row.context for row in found if row.step == "skewed"} == {131072}


def test_a_plan_over_its_limit_fails_on_the_gpu_that_the_limit_is_for() -> None:
    failed = [(row.batch, row.failed) for row in rows("NVIDIA H200", 8.5, shared=False) if row.failed]
    assert failed == [(256, "expected at most 8 us; got 8.5")] * 3
    other = rows("another GPU", 100.0, shared=False)
    assert all(row.limit_us is None and not row.failed for row in other)


def test_detection_at_both_contexts() -> None:
    found = rows("NVIDIA H200", 20.0, shared=True)
    assert [(row.step, row.context) for row in found] == [
        (name, context - 5) for context in (4096, 32768) for name in SHAPES
    ]
    # At 4k the limit is 15, at 32k it is 30.
    assert [bool(row.failed) for row in found] == [True] * 5 + [False] * 5
    assert [row.limit_us for row in found] == [15.0] * 5 + [30.0] * 5
    assert {row.where for row in found} == {"device-shared"}
    assert [row.prefix_nodes for row in found[:5]] == [0, 1, 33, 84, 128]


def test_other_bytes_than_the_hosts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan_on_device

    def flat(self: Planner, starts: Any, lens: Any, buffer: Any, table: Any = None) -> None:
        plan(self, starts, lens, buffer, None)

    monkeypatch.setattr(Planner, "plan_on_device", flat)
    found = rows("another GPU", 1.0, shared=True)
    assert [row.failed for row in found if row.step == "nothing"] == ["", ""]
    assert {row.failed for row in found if row.step != "nothing"} == {
        "expected the bytes of the host's plan; got others"
    }


def test_a_step_is_filled_in_place() -> None:
    step = shared_step(64 * PAGE, CPU)
    assert step.table is not None
    assert step.table.indices is not None
    place = step.table.indices.data_ptr()
    rows_of = np.ascontiguousarray(SHAPES["groups"](64))
    step.fill(torch.from_numpy(rows_of))
    assert step.table.indices.data_ptr() == place
    np.testing.assert_array_equal(step.table.indices.numpy().reshape(BATCH, 64), rows_of)
    step.plan()
    assert step.planned().num_nodes == step.expected().num_nodes > 1
    starts, lens = next((starts, lens) for _, starts, lens in flat_steps())
    with_table = DeviceStep(plan_time.planner_for_steps(), starts, lens, CPU)
    assert with_table.table is None


@pytest.mark.parametrize(("us", "code"), [(5.0, 0), (9.0, 1)])
def test_the_command(us: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"date": "d", "gpu": "NVIDIA H200", "driver": "1", "versions": {}, "command": "c"}
    monkeypatch.setattr("fi_backend.benchmarks.record.gpu_provenance", lambda _: known)
    monkeypatch.setattr(plan_time, "graph_timer", lambda _: timer(us))
    monkeypatch.setattr(bench_cuda, "torch_device", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "plan.json"
    command = ["bench", "plan", "--device", "cuda", "--json", str(out)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "160"})
    assert result.exit_code == code, result.stderr
    record = json.loads(out.read_text())
    assert {**known, "ctas": 132, "shared": False, "plans_in_a_graph": PLANS} == {
        key: value for key, value in record.items() if key != "rows"
    }
    assert len(record["rows"]) == 13
    assert {row["limit_us"] for row in record["rows"]} == {None, 8.0}
    shown = [line.split() for line in result.stdout.splitlines()]
    assert ["even", "256", "4096", f"{us:.2f}", f"{us - 0.8:.2f}", f"{us + 0.8:.2f}", "8"] in [
        line[:7] for line in shown
    ]
    assert ("even, batch 256, failed: expected at most 8 us; got 9" in result.stdout) == bool(code)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "gpu"], "--device: expected cpu or cuda; got 'gpu'"),
        (["--device", "cuda", "--calls", "5"], "--calls: expected --device cpu; got cuda"),
        (["--device", "cuda", "--batch", "16"], "--batch: expected --device cpu; got cuda"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "plan", *options], env={"COLUMNS": "160"})
    assert result.exit_code == 2
    assert message in result.stderr
