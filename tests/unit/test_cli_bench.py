# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench`: what it writes, and that it measures what it says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fi_backend.benchmarks import ceilings, cpu_kernels, plan_time, workloads
from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.benchmarks.plan_time import mixed_steps, shared_steps
from fi_backend.benchmarks.vllm_cpu import VllmCpu
from fi_backend.benchmarks.workloads import CPU_SPEC, Workload, make_problem
from fi_backend.cli.main import app
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError

RUN = CliRunner()
TINY = Workload("tiny", (1, 5, 1), (70, 133, 1))
CEILINGS = {"read_gbs": 10.0, "matmul_tflops": 0.5}
SPEC = AttentionSpec(4, 2, 64, dtype="bfloat16", page_size=32)


class Fixed(Peer):
    """Returns a given answer and takes a given time."""

    def __init__(self, name: str, answer: Callable[[Problem], torch.Tensor], seconds: float = 0) -> None:
        self.name = name  # type: ignore[misc]
        self.answer, self.seconds = answer, seconds
        self.calls: list[int] = []

    def unavailable(self) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Run:
        answer = self.answer(problem)

        def run(layer: int) -> torch.Tensor:
            self.calls.append(layer)
            time.sleep(self.seconds)
            return answer

        return run


def test_plan_writes_the_record(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = RUN.invoke(app, ["bench", "plan", "--batch", "3,40", "--calls", "20", "--json", str(out)])
    assert result.exit_code == 0, result.stderr
    document = json.loads(out.read_text())
    assert set(document) == {"date", "host", "versions", "command", "ctas", "shared", "rows"}
    assert document["ctas"] == 132
    assert document["shared"] is False
    assert document["versions"]["torch"] == metadata.version("torch")
    rows = document["rows"]
    assert [(row["where"], row["batch"]) for row in rows] == [
        ("host", 3),
        ("host-native", 3),
        ("host", 40),
        ("host-native", 40),
    ]
    for row in rows:
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
        assert row["calls"] == 20
        assert row["items"] >= row["batch"]
    for row in rows:
        assert f"{row['median_us']:.1f}" in result.stdout


def test_the_whole_call_contains_the_native_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the native planner and the making of a table advance, and nothing else."""
    now = [0]

    def takes(microseconds: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            now[0] += 1000 * microseconds
            return call(*arguments, **options)

        return timed

    monkeypatch.setattr(plan_time, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    monkeypatch.setattr(Planner, "plan", takes(30, Planner.plan))
    make = plan_time.PageTable.from_block_table
    monkeypatch.setattr(plan_time.PageTable, "from_block_table", staticmethod(takes(12, make)))
    whole, native = plan_time.time_planning(3, 132, calls=5)
    assert (whole.where, whole.median_us, whole.p10_us, whole.p90_us) == ("host", 42, 42, 42)
    assert (native.where, native.median_us) == ("host-native", 30)


def test_plan_times_shared_steps(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    options = ["--batch", "40", "--calls", "5", "--shared", "--json", str(out)]
    result = RUN.invoke(app, ["bench", "plan", *options])
    assert result.exit_code == 0, result.stderr
    document = json.loads(out.read_text())
    assert document["shared"] is True
    assert [row["where"] for row in document["rows"]] == ["host", "host-native", "host-forest"]
    assert "host-forest: finding" in result.stdout
    for step in shared_steps(40):
        assert int(step.kv_lens.max()) <= 8192
        forest = PrefixForest.from_block_table(step.block_table, step.kv_lens - 1, 16)
        ends = forest.nodes[:, 2].tolist()
        assert sorted(ends) == [1024] + [2048] * 5, "one prompt for all, one for each of five groups"


def test_planned_lengths_are_mixed_and_fixed() -> None:
    steps = mixed_steps(64)
    for step, again in zip(steps, mixed_steps(64), strict=True):
        assert torch.equal(step.kv_lens, again.kv_lens)
        assert torch.equal(step.qo_indptr, again.qo_indptr)
        q_lens = step.qo_indptr.diff()
        assert int((q_lens > 1).sum()) == 4
        assert bool((q_lens <= step.kv_lens).all())
        assert 64 <= int(step.kv_lens.min()) < int(step.kv_lens.max()) <= 8192
    assert not torch.equal(steps[0].kv_lens, steps[1].kv_lens)


def test_json_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    arguments = [
        "bench",
        "plan",
        "--batch",
        "1",
        "--calls",
        "1",
        "--json",
        str(tmp_path / "no" / "plan.json"),
    ]
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 2
    assert "--json: expected a file that can be written" in result.stderr


def test_kernels_writes_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workloads, "CPU_WORKLOADS", (TINY,))
    monkeypatch.setattr(workloads, "_ROTATED_BYTES", 0)
    monkeypatch.setattr("fi_backend.benchmarks.ceilings.cpu_ceilings", lambda _: CEILINGS)

    class Registered:
        def peers(self, device: str) -> list[Peer]:
            missing = Fixed("absent", lambda p: p.q)
            missing.unavailable = lambda: "it is not installed [/lib]"  # type: ignore[method-assign]
            return [Fixed("exact", lambda p: exact_attention(p, 0).to(p.q.dtype)), missing]

    monkeypatch.setattr("fi_backend.hooks.plugins", Registered)
    out = tmp_path / "kernels.json"
    result = RUN.invoke(app, ["bench", "kernels", "--runs", "3", "--json", str(out)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.stderr
    assert "absent was not measured: it is not installed [/lib]" in result.stdout
    document = json.loads(out.read_text())
    assert set(document) == {"date", "host", "versions", "command", "threads", "ceilings", "rows"}
    assert document["ceilings"] == CEILINGS
    [row] = document["rows"]
    assert row["workload"] == "tiny"
    assert set(row["peers"]) == set(row["peers_max_err"]) == {"exact"}
    low, high = row["ours_spread"]
    assert 0 < low <= row["ours_us"] <= high
    assert row["max_err"] < 0.02
    assert row["tokens_per_s"] == pytest.approx(7e6 / row["ours_us"], rel=0.01)
    assert f"{row['ours_us'] / row['peers']['exact']:.2f}" in result.stdout


def test_errors_times_and_refusals_of_peers() -> None:
    slow = Fixed("slow", lambda p: exact_attention(p, 0), seconds=0.003)
    wrong = Fixed("wrong", lambda p: exact_attention(p, 0) + 0.5)
    silent = Fixed("silent", lambda p: torch.full_like(p.q, float("nan")))

    def refuse(_: Problem) -> torch.Tensor:
        raise UnsupportedError("page_size")

    ticks: list[int] = []
    row = cpu_kernels.time_kernels(
        TINY,
        SPEC,
        [slow, wrong, silent, Fixed("refused", refuse)],
        CEILINGS,
        rounds=3,
        passes=2,
        progress=lambda: ticks.append(1),
    )
    assert set(row.peers) == {"slow", "wrong", "silent"}
    assert row.peers["slow"] >= 3000
    assert row.peers_max_err["slow"] == 0
    assert row.peers_max_err["wrong"] == pytest.approx(0.5)
    assert row.peers_max_err["silent"] == float("inf")
    assert row.max_err < 0.02
    assert len(ticks) == 3
    # Every layer in every pass of every round, after one call for the check.
    assert slow.calls == [0, *(list(range(row.layers)) * 6)]


def test_floor_and_counts_of_a_workload_by_hand() -> None:
    # Request (q 5, kv 133): query tokens see 129, 130, 131, 132 and 133 keys.
    assert TINY.flops(SPEC) == 2 * (70 + 655 + 1) * 4 * 128
    assert TINY.kv_bytes(SPEC) == 204 * 2 * 128 * 2
    decode = workloads.CPU_WORKLOADS[0]
    assert decode.kv_bytes(CPU_SPEC) == 16 * 2048 * 8 * 256 * 2
    assert (decode.name, decode.tokens) == ("decode 16 x 2k", 16)


def test_exact_attention_is_softmax_attention() -> None:
    problem = make_problem(TINY, SPEC)
    exact = exact_attention(problem, 0)
    # Request 2 has one key: its value is the answer.
    page = int(problem.block_table[2, 0])
    value = problem.layers[0][1][page, 0]
    torch.testing.assert_close(exact[6], value.double().repeat_interleave(2, 0))
    # The first of request 1's queries sees 129 keys.
    pages = problem.block_table[1].long()
    keys, values = (cache[pages, :, 1].reshape(-1, 64)[:129].double() for cache in problem.layers[0])
    weights = (problem.q[1, 3].double() @ keys.T / 8).softmax(0)
    torch.testing.assert_close(exact[1, 3], weights @ values)


def test_ceilings_are_rates_of_the_best_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given: those of a machine depend on its processor and on who else is there."""
    monkeypatch.setattr(ceilings, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceilings, "_SIDE", 200)
    seconds = iter((3e-4, 1e-4, 2e-4, 8e-6, 9e-6, 2e-6))

    def given(call: Callable[[], torch.Tensor]) -> float:
        assert call().shape in ((), (200, 200))
        return next(seconds)

    monkeypatch.setattr(ceilings, "_seconds", given)
    found = ceilings.cpu_ceilings("bfloat16", repeats=3)
    # 1 MiB in 0.1 ms; two operations for each of 200^3 products in 2 us.
    assert found == {"read_gbs": 10.49, "matmul_tflops": 8.0}
    monkeypatch.undo()
    assert ceilings._seconds(lambda: time.sleep(0.01)) >= 0.01


@pytest.mark.slow
def test_vllm_s_operator_agrees_with_float64() -> None:
    peer = VllmCpu()
    if reason := peer.unavailable():
        pytest.skip(reason)
    problem = make_problem(TINY, SPEC)
    run = peer.prepare(problem)
    error = (run(0).double() - exact_attention(problem, 0)).abs().max()
    assert float(error) < 0.02
    with pytest.raises(UnsupportedError, match="multiples of 32; got 16"):
        peer.prepare(make_problem(TINY, AttentionSpec(4, 2, 64, page_size=16)))
