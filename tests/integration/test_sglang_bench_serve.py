# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench serve --engine sglang` with a real server on the CPU: samples of shared prompts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo_sglang import STUBS
from fi_backend import env
from fi_backend.benchmarks.serving.records import REQUESTS, read_record

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

pytestmark = [
    pytest.mark.engine,
    # Looked for, not imported: this process lacks the stand-ins that the server gets.
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

MAIN = "from fi_backend.cli.main import app; app()"
ARGUMENTS = (
    *("--engine", "sglang", "--model", "copy-llama", "--device", "cpu", "--backend", "fi"),
    *("--workload", "shared-prefix:levels=256,own=32,out=8,n=2", "--rates", "4,8", "--requests", "8"),
    *("--runs", "1", "--max-len", "1024", "--slo-ttft-p99", "60s", "--warm-up", "2"),
)


def test_sglang_under_load(tmp_path: Path) -> None:
    path = os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "PYTHONPATH": path, "COLUMNS": "200"}
    environment = env.child_environment(**settings)
    # What the tests of the adapter set; bench serve knows what SGLang needs on a CPU.
    for name in ("TRITON_INTERPRET", "SGLANG_USE_CPU_ENGINE"):
        environment.pop(name, None)
    command = ["bench", "serve", *ARGUMENTS, "--out", str(tmp_path), "--", "--page-size=16"]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "fi: holds 8 requests/s" in done.stdout
    record = read_record(tmp_path)
    assert record["engine"] == "sglang"
    [entry] = record["backends"]
    assert entry["failed"] is None
    assert entry["builds"]["after_ready"] == []
    assert [row["rate"] for row in entry["points"]] == [4, 8]
    for row in entry["points"]:
        assert (row["completed"], row["errors"]) == (8, 0)
        low, value, high = (row["ttft_ms"]["p99"][index] for index in (1, 0, 2))
        assert 0 < low <= value <= high
        assert row["fi"]["attention_calls"] == 2 * row["fi"]["steps"] > 0
        assert row["fi"]["shared_plans"] > 0
        assert 0 < row["kv_bytes"]["saved"] < row["kv_bytes"]["flat"]
        assert row["balance"]["shared"] is True
    lines = [json.loads(line) for line in (tmp_path / REQUESTS).read_text().splitlines()]
    assert [(line["received_tokens"], line["error"]) for line in lines] == [(2 * 8, None)] * 16
    assert all(times[0] > 0 and times == sorted(times) for line in lines for times in line["piece_ms"])
    assert "<svg" in (tmp_path / "report.html").read_text()
