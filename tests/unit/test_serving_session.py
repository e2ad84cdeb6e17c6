# SPDX-License-Identifier: Apache-2.0
"""`bench serve` from the command line to its files, with a server in a thread in place of the engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from serving_bench import bench
from serving_fake import FakeServer

from fi_backend.benchmarks.serving import engines, records, session
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome, Request
from fi_backend.benchmarks.serving.server import ServerError
from fi_backend.cli import serve_options
from fi_backend.cli.main import app

RUN = CliRunner()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_grid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str) -> None:
    out = tmp_path / "out"
    backends = "fi,fi+FI_BACKEND_WITHOUT=sharing,TRITON"
    result = bench(
        monkeypatch, out, "--engine", engine, "--backend", backends, "--rates", "20,40", "--", "--extra=1"
    )
    assert result.exit_code == 0, result.output
    assert "fi: holds 40 requests/s" in result.stdout
    record = records.read_record(out)
    assert (record["engine"], record["model"]) == (engine, "dummy:tiny")
    assert [each["name"] for each in record["backends"]] == backends.split(",")
    for entry in record["backends"]:
        assert [row["rate"] for row in entry["points"]] == [20, 40]
        assert entry["sustained"] == {"rate": 40, "failed": None, "how": "grid"}
        assert entry["command"][-1] == "--extra=1"
        for row in entry["points"]:
            assert (row["requests"], row["completed"], row["errors"], row["holds"]) == (20, 20, 0, True)
            assert row["kv_bytes"]["flat"] == 20 * (21 + 22 + 23) * 2 * 2 * 2 * 64 * 2
            assert (row["fi"] is None) == (entry["name"] == "TRITON")
    assert record["backends"][1]["variables"] == {"FI_BACKEND_WITHOUT": "sharing"}
    lines = [json.loads(line) for line in (out / records.REQUESTS).read_text().splitlines()]
    assert len(lines) == 3 * 2 * 20
    assert {(line["prompt_tokens"], line["received_tokens"], line["error"]) for line in lines} == {
        (20, 4, None)
    }
    assert all(len(line["piece_ms"][0]) == 4 for line in lines)
    assert "<svg" in (out / "report.html").read_text()


def one_worker(
    _url: str, _protocol: Any, _model: str, requests: Sequence[Request], **options: Any
) -> LoadRun:
    """A load on a server that takes 50 ms a request, by a clock of its own: no busy machine delays it."""
    run, free = LoadRun([Outcome(request.samples, sent=0.0) for request in requests]), 0.0
    for request, outcome in zip(requests, run.outcomes, strict=True):
        free = max(free, request.at) + 0.05
        outcome.take(0, [1] * request.max_tokens, free - request.at)
        outcome.ended = request.samples
    run.seconds = free
    if options.get("give_up"):
        limit, allowed = options["give_up"]
        run.stopped = run.late(limit, free, requests) > allowed
    return run


def test_the_highest_rate_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker that takes 50 ms a request cannot do much more than 20 a second."""
    limits = ("--start-rate", "200", "--slo-ttft-p99", "400ms", "--tolerance", "0.3")
    options = (*limits, "--requests", "40", "--runs", "1")
    monkeypatch.setattr(session, "run_load", one_worker)
    result = bench(monkeypatch, tmp_path / "out", "--backend", "fi", *options)
    assert result.exit_code == 0, result.output
    [entry] = records.read_record(tmp_path / "out")["backends"]
    assert entry["sustained"]["how"] == "bisection"
    assert 1 <= entry["sustained"]["rate"] < entry["sustained"]["failed"] <= 50
    assert (entry["points"][0]["rate"], entry["points"][0]["stopped_early"]) == (200, True)


def test_back_ends_and_runs_get_the_same_or_other_prompts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prompts(name: str) -> list[list[int]]:
        bench(monkeypatch, tmp_path / name, "--backend", name, "--rates", "50")
        return [body["prompt"] for body in engines.ENGINES["vllm"].server.bodies if len(body["prompt"]) == 20]  # type: ignore[attr-defined]

    first, second = prompts("fi"), prompts("TRITON")
    assert sorted(first) == sorted(second)
    assert len({tuple(prompt) for prompt in first}) == len(first) == 22  # two of the warm-up, two runs of ten


def test_shared_prefixes_are_in_the_cache_before_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = "shared-prefix:levels=30/10*2,own=5,out=2"
    bench(
        monkeypatch,
        tmp_path / "out",
        "--backend",
        "fi",
        "--rates",
        "50",
        "--workload",
        workload,
        "--runs",
        "1",
    )
    bodies = engines.ENGINES["vllm"].server.bodies  # type: ignore[attr-defined]
    primers = [body["prompt"] for body in bodies if len(body["prompt"]) == 40]
    asked = [body["prompt"] for body in bodies if len(body["prompt"]) == 45]
    assert len(primers) == 2
    assert all(prompt[:40] in primers for prompt in asked[2:])


@pytest.mark.parametrize(
    ("backend", "changes", "words"),
    [
        ("fi", {"starts": False}, "vllm serve ended with status 1"),
        ("fi", {"layers": 0}, "another back end served the layers"),
        ("fi", {"layers": 3}, "expected a multiple of 2 layers on ours; counted 3"),
        ("fi", {"fails": 500}, "the warm-up failed: status 500"),
    ],
)
def test_a_failure_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str, changes: dict[str, Any], words: str
) -> None:
    result = bench(monkeypatch, tmp_path / "out", "--backend", backend, "--rates", "20", **changes)
    assert result.exit_code == 1
    [entry] = records.read_record(tmp_path / "out")["backends"]
    assert words in entry["failed"]
    assert f"{backend} failed" in result.stdout
    assert words in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slo-ttft-p99", "200"], "--slo-ttft-p99: expected a duration such as 200ms or 0.2s; got '200'"),
        (["--slo-itl-p99", "0ms"], "--slo-itl-p99: expected a duration"),
        (["--rates", "4,x"], "--rates: expected numbers above 0 separated by commas; got 'x' in '4,x'"),
        (["--rates", "4,-1"], "got '-1'"),
        (["--requests", "1"], "--requests: expected >= 2; got 1"),
        (["--workload", "nothing"], "--workload: expected sharegpt"),
        (["--backend", "fi+X"], "--backend: expected NAME or NAME+VARIABLE=VALUE; got 'fi+X'"),
        (["--model", "dummy:9b"], "--model: expected one of copy-llama, dummy:8b, dummy:tiny"),
        (["--start-rate", "9", "--max-rate", "3"], "--max-rate: expected >= --start-rate 9; got 3"),
        (["--device", "tpu"], "--device: expected auto, cpu or cuda; got 'tpu'"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: str
) -> None:
    result = bench(monkeypatch, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr.replace("\n", "")
    assert not (tmp_path / "out" / "record.json").exists()


def test_a_folder_with_a_record_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("mine")
    result = bench(monkeypatch, tmp_path, "--rates", "9")
    assert result.exit_code == 2
    assert "holds a record already" in result.stderr
    assert (tmp_path / "record.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("left", "words"), [("requests.jsonl", "holds requests already"), ("stats/fi", "holds counters already")]
)
def test_what_a_killed_run_left_is_not_taken_for_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: str, words: str
) -> None:
    """Old counters would show that fi served, old requests would be pooled; a record may be missing."""
    (tmp_path / left).mkdir(parents=True)
    result = bench(monkeypatch, tmp_path, "--rates", "9")
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_brackets_of_a_log_are_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Markup for the terminal otherwise, and an end of what was never begun raised an error."""

    class Broken(FakeServer):
        def __enter__(self) -> FakeServer:
            raise ServerError("it ended with status 1\n[/usr/lib/a.so] [rank0] lost")

    result = bench(monkeypatch, tmp_path, "--rates", "9", server=Broken)
    assert result.exit_code == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "[/usr/lib/a.so] [rank0] lost" in result.stdout


@pytest.mark.parametrize("module", ["vllm", "aiohttp"])
def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str) -> None:
    monkeypatch.setattr(
        serve_options.importlib.util, "find_spec", lambda name: None if name == module else name
    )
    result = RUN.invoke(app, ["bench", "serve", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert f"expected {module} in this environment" in result.stderr


def test_the_users_arguments_replace_ours() -> None:
    kind, backend = engines.ENGINES["vllm"], engines.parse_backend("fi")
    made = engines.server_arguments(
        kind, backend, max_len=64, cpu=True, dummy=True, extra=["--dtype", "float16", "--max-model-len=99"]
    )
    assert made[-3:] == ["--dtype", "float16", "--max-model-len=99"]
    assert not any(each.startswith(("--dtype=", "--max-model-len=6")) for each in made)
    assert "--load-format=dummy" in made
