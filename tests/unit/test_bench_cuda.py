# SPDX-License-Identifier: Apache-2.0
"""`bench kernels --device cuda` without a GPU: rows, statistics and the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_peers import CEILINGS, PREFIXED, SPEC, EagerClock, EagerStep, Fixed, exact, without_gpu
from typer.testing import CliRunner

from fi_backend.benchmarks.cuda import measure
from fi_backend.benchmarks.cuda.cases import Case, make_problem
from fi_backend.benchmarks.cuda.ceilings import read_module
from fi_backend.benchmarks.cuda.exact import Errors
from fi_backend.benchmarks.cuda.measure import time_case
from fi_backend.benchmarks.cuda.row import Contender, CudaTiming
from fi_backend.benchmarks.peers import Peer, Problem
from fi_backend.cli.main import app
from fi_backend.core import jit
from fi_backend.core.jit.compiler import toolchain
from fi_backend.errors import BuildError, UnsupportedError

__all__ = ["without_gpu"]


def measured(case: Case, peers: list[Peer], runs: int = 3) -> CudaTiming:
    problem = make_problem(case, layers=2, device="cpu")
    return time_case(case, problem, peers, EagerClock(), CEILINGS, runs=runs)


def test_a_row() -> None:
    def refuse(_: Problem) -> torch.Tensor:
        raise UnsupportedError("no prefix")

    def fail(_: Problem) -> torch.Tensor:
        raise RuntimeError("out of\nregisters")

    case = Case(replace(PREFIXED, prefixes=()), SPEC, ("ragged", "planned_queues"))
    peers: list[Peer] = [
        Fixed("slow", exact, 300),
        Fixed("good", exact, 100),
        Fixed("wrong", lambda p: exact(p) + 0.5),
        Fixed("silent", lambda p: torch.full_like(p.q, float("nan"))),
        Fixed("refused", refuse),
        Fixed("broken", fail),
    ]
    row = measured(case, peers)
    assert row.best_peer == "good"
    assert row.wrong == ["wrong", "silent"]
    assert row.not_measured == {"refused": "no prefix", "broken": "RuntimeError: out of registers"}
    assert set(row.variants) == {"ragged", "planned_queues"}
    # The product's time is taken off.
    assert (row.ours_us, row.ours_spread, row.spacer_us) == (100, (100, 100), 2000)
    assert row.peers == {"slow": 400, "good": 200, "wrong": 100, "silent": 100}
    assert (row.ratio, row.ratio_upper95) == (0.5, 0.5)
    assert row.ratios == {"slow": (0.25, 0.25), "good": (0.5, 0.5), "wrong": (1, 1), "silent": (1, 1)}
    assert (row.failed, row.marked) == ([], {})
    assert row.max_err is not None
    assert row.max_err < 0.02
    assert all(each["max_err"] is not None and each["max_err"] < 0.02 for each in row.variants.values())
    assert row.peers_max_err["wrong"] == pytest.approx(0.5, abs=0.02)
    assert row.peers_max_err["silent"] is None
    assert {name: len(times) for name, times in row.runs.items()} == dict.fromkeys(
        ("fi", "ragged", "planned_queues", "slow", "good", "wrong", "silent"), 3
    )
    read_us = (263 * 256 * 2 + 2 * 6 * 4 * 64 * 2) / 10e3
    assert row.floor_us == pytest.approx(read_us, abs=0.01)
    assert row.bandwidth_share == pytest.approx(row.floor_us / 100, abs=1e-3)


def test_the_order_changes_from_run_to_run() -> None:
    calls: list[str] = []

    class Noted(EagerStep):
        def __init__(self, name: str) -> None:
            self.name = name
            self.output = torch.zeros(1)

        def replay(self) -> None:
            pass

        def time_us(self) -> float:
            calls.append(self.name)
            return 1.0

    names = ["a", "b", "c"]
    contenders = {name: Contender(Noted(name), Errors(0, 0), 1.0) for name in names}
    measure.interleave(contenders, Noted("product"), 1, 4)
    rounds = [calls[i : i + 4] for i in range(0, 16, 4)]
    assert all(sorted(each) == ["a", "b", "c", "product"] for each in rounds)
    assert len({tuple(each) for each in rounds}) >= 3
    assert all(len({each.index(name) for each in rounds}) >= 2 for name in names)


def test_ours_failing_leaves_a_gap() -> None:
    case = Case(replace(PREFIXED, prefixes=()), SPEC)
    problem = make_problem(case, layers=2, device="cpu")
    broken = replace(problem, spec=replace(SPEC, alibi=True))
    row = time_case(case, broken, [Fixed("good", exact)], EagerClock(), CEILINGS, runs=3)
    assert (row.ours_us, row.ours_spread, row.max_err, row.ratio, row.bandwidth_share) == (None,) * 5
    assert "alibi_slopes" in row.not_measured["fi"]
    assert row.failed == [f"fi: {row.not_measured['fi']}"]
    assert row.best_peer == "good"


def test_batch_invariant_row_has_the_cost_beside_it() -> None:
    case = Case(replace(PREFIXED, prefixes=()), replace(SPEC, batch_invariant=True), ("not_invariant",))
    row = measured(case, [Fixed("good", exact)])
    assert row.variants["not_invariant"]["us"] == 100
    assert "not_invariant" not in row.peers


def test_the_record_grows_row_by_row(
    without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kernels.json"
    seen: list[int] = []

    def watched(*arguments: object, **options: object) -> CudaTiming:
        seen.append(len(json.loads(out.read_text())["rows"]))
        return time_case(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("fi_backend.benchmarks.cuda.measure.time_case", watched)
    command = ["bench", "kernels", "--device", "cuda", "--runs", "3", "--json", str(out)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert seen == [0, 1]
    document = json.loads(out.read_text())
    keys = {"date", "gpu", "driver", "versions", "command", "ceilings", "rows"}
    assert keys <= set(document)
    assert document["ceilings"] == CEILINGS
    assert document["peers_absent"] == {"absent": "it is not installed [/lib]"}
    assert [row["workload"] for row in document["rows"]] == ["small", "shared"]
    assert [row["prefix_nodes"] for row in document["rows"]] == [0, 1]
    page1 = document["rows"][0]["variants"]["page1"]
    assert document["summary"] == {
        "rows": 2,
        "failed": {},
        "page1": {"small": [page1["ratio"], page1["ratio_upper95"]]},
        "attention_variants": {},
    }
    assert document["table"] == "targets"
    for row in document["rows"]:
        assert {"workload", "ours_us", "ours_spread", "peers", "floor_us", "max_err"} <= set(row)
        assert set(row["peers"]) == {"exact"}
        low, high = row["ours_spread"]
        assert 0 < low <= row["ours_us"] <= high
    first = document["rows"][0]
    assert f"{first['ours_us']:.1f}" in result.stdout
    assert f"{first['ratio_upper95']:.3f}" in result.stdout
    assert f"ragged {first['variants']['ragged']['us']:.1f}" in result.stdout
    assert "absent was not measured: it is not installed [/lib]" in result.stdout
    assert len(result.stdout.splitlines()) == 5
    assert "small: fi" in result.stderr
    head, *lines = result.stdout.splitlines()[1:4]
    end = head.index("nodes") + len("nodes")
    assert [line[:end].split()[-1] for line in lines] == ["-", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


def test_the_kernel_that_reads_compiles() -> None:
    try:
        toolchain("sm_80")
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    [library] = jit.build_all([read_module("sm_80")])
    assert library.is_file()


def test_without_a_gpu_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda"])
    assert result.exit_code == 2
    assert "torch sees none" in result.stderr
