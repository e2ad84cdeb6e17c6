# SPDX-License-Identifier: Apache-2.0
"""The serving scripts on a server in a thread: one client, whose lag stands beside what it measured."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from serving_fake import FakeServer

import serve_copy
import serve_prefixes
import serve_prefixes_sglang
import serve_trace
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome
from recording import run_main

Script = Callable[..., dict[str, Any]]


class Served(FakeServer):
    """Knows vLLM's metric; counts as an engine of the model's two layers would, and no shared plan."""

    def __init__(self, model: Path, arguments: list[str], **settings: Any) -> None:
        super().__init__(str(model), [argument.replace("=FI", "=fi") for argument in arguments], **settings)

    def metric(self, _name: str) -> float:
        return 0.0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """Run a script's main() with arguments and return the record that it wrote."""

    def run(module: Any, *arguments: str) -> dict[str, Any]:
        for name in ("VllmServer", "SglangServer"):
            monkeypatch.setattr(module, name, Served, raising=False)
        monkeypatch.setattr(module, "circumstances", lambda *_: {"gpu": "none"})
        path = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", ["script", *arguments, f"--json={path}"])
        module.main()
        return dict(json.loads(path.read_text()))

    return run


def check_lags(row: dict[str, Any], requests: int) -> None:
    assert row["lag_ms"]["count"] == requests
    assert 0 <= row["lag_ms"]["p50"] <= row["lag_ms"]["p99"]
    # Times count from when a request was due: what came late was sent late.
    assert row["ttft_ms"]["p50"] > row["lag_ms"]["p50"]
    assert {"p50", "p90", "p99"} < set(row["loop_lag_ms"])


def test_a_trace_is_replayed(script: Script, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    times = [0, 40, 80, 120]
    trace.write_text("".join(json.dumps({"t_ms": t, "in": 50, "out": 4}) + "\n" for t in times))
    options = ("--shape=tiny", "--seconds=5", f"--trace={trace}")
    record = script(serve_trace, *options, "--backend=FI", "--backend=OTHER")
    for name, row in record["rows"].items():
        assert (row["requests"], row["errors"]) == (4, 0)
        assert ("fi" in row) == (name == "FI")
        assert row["output_tokens_per_s"] > 0
        assert row["took_s"] >= 0.1
        assert row["itl_ms"]["count"] == 4 * 3
        check_lags(row, 4)


@pytest.mark.parametrize("module", [serve_prefixes, serve_prefixes_sglang])
def test_prefixes_in_rounds(script: Script, module: Any) -> None:
    sizes = ("--shape=tiny", "--requests=6", "--groups=2", "--common=32", "--group=16", "--own=8")
    ways = ("--way=flat", f"--way={'triton' if module is serve_prefixes_sglang else 'TRITON_ATTN'}")
    record = script(module, *sizes, "--answer=5", "--rounds=3", *ways)
    flat, other = record["rows"].values()
    assert flat["fi"]["layers"] == 2
    assert "fi" not in other
    for row in (flat, other):
        assert row["errors"] == 0
        assert len(row["round_s"]) == 3
        assert row["ttft_ms"]["count"] == 2 * 6
        check_lags(row, 2 * 6)


class SlowToStop(Served):
    """Is ended from outside while it stops."""

    stopped: list[bool]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.stopped.append(True)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("module", [serve_prefixes, serve_prefixes_sglang])
def test_what_was_measured_stays_when_the_script_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any
) -> None:
    path = tmp_path / "record.json"
    SlowToStop.stopped = []
    for name in ("VllmServer", "SglangServer"):
        monkeypatch.setattr(module, name, SlowToStop, raising=False)
    monkeypatch.setattr(module, "circumstances", lambda *_: {"gpu": "none"})
    sizes = ("--shape=tiny", "--requests=4", "--groups=2", "--common=32", "--group=16", "--own=8")
    options = ("--answer=3", "--rounds=2", "--way=flat", "--way=shared", f"--json={path}")
    monkeypatch.setattr(sys, "argv", ["script", *sizes, *options])
    with pytest.raises(SystemExit) as end:
        run_main(module.main)
    assert end.value.code == 128 + signal.SIGTERM
    assert SlowToStop.stopped == [True]
    rows = json.loads(path.read_text())["rows"]
    assert list(rows) == ["flat"]
    assert (rows["flat"]["errors"], len(rows["flat"]["round_s"])) == (0, 2)


def test_copied_answers_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Every client that stays gets wrong tokens here; those that hang up do so where they are to."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"t_ms": 10 * t, "in": 120, "out": 20}) + "\n" for t in range(12)))
    monkeypatch.setattr(serve_copy, "VllmServer", Served)
    monkeypatch.setattr(sys, "argv", ["serve_copy", f"--trace={trace}", "--seconds=5", "--aborts=0.5"])
    with pytest.raises(SystemExit, match="expected right answers"):
        serve_copy.main()
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["requests"], report["errors"], report["fi_layers"]) == (12, 0, 2)
    assert report["wrong"] == 12
    assert 0 < report["aborted"] < 12
    assert report["lag_ms"]["count"] == 12


def test_gaps_count_while_all_requests_decode() -> None:
    run = LoadRun([outcome_at([0.1, 0.2, 0.3, 0.9]), outcome_at([0.2, 0.4, 0.5])])
    assert serve_prefixes.gaps_of_all(run) == pytest.approx([0.1, 0.2, 0.1])


def outcome_at(times: list[float]) -> Outcome:
    outcome = Outcome()
    for at in times:
        outcome.take(0, [1], at)
    return outcome
