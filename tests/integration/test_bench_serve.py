# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench serve` with real vLLM on the CPU: two back ends, two rates, samples of shared prompts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fi_backend import env
from fi_backend.benchmarks.serving.records import REQUESTS, read_record

pytestmark = pytest.mark.engine

MAIN = "from fi_backend.cli.main import app; app()"
ARGUMENTS = (
    *("--engine", "vllm", "--model", "copy-llama", "--device", "cpu"),
    *("--workload", "uniform:in=300,out=16,n=4", "--rates", "4,8", "--requests", "12", "--runs", "1"),
    *("--max-len", "1024", "--slo-ttft-p99", "30s", "--warm-up", "4"),
)


def test_two_back_ends_at_two_rates(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "COLUMNS": "200"}
    # A cold start: what the engine did not compile before it was ready would be compiled under load.
    cold = f"fi+FI_BACKEND_CACHE_DIR={tmp_path / 'cache'}"
    backends = ("--backend", cold, "--backend", "CPU_ATTN")
    done = subprocess.run(
        [*(sys.executable, "-c", MAIN, "bench", "serve", *ARGUMENTS, *backends), "--out", str(tmp_path)],
        env=env.child_environment(**settings),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"{cold}: holds 8 requests/s" in done.stdout.replace("\n", "")
    record = read_record(tmp_path)
    ours, theirs = record["backends"]
    assert (ours["name"], theirs["name"]) == (cold, "CPU_ATTN")
    assert ours["builds"]["before_ready"] > 0
    assert theirs["builds"]["before_ready"] == 0
    for entry in (ours, theirs):
        assert entry["failed"] is None
        assert entry["builds"]["after_ready"] == []
        assert [row["rate"] for row in entry["points"]] == [4, 8]
        for row in entry["points"]:
            assert (row["completed"], row["errors"]) == (12, 0)
            low, value, high = (row["ttft_ms"]["p99"][index] for index in (1, 0, 2))
            assert 0 < low <= value <= high
            # A client that is kept waiting for a core gets several tokens at once, with nothing between them.
            assert row["itl_ms"]["p50"][0] >= 0
            assert row["itl_ms"]["p99"][0] > 0
    for row in ours["points"]:
        counts = row["fi"]
        assert counts["attention_calls"] == 2 * counts["steps"] > 0
        # Four samples of a prompt of two full pages read these pages once.
        assert counts["shared_plans"] > 0
        assert 0 < row["kv_bytes"]["saved"] < row["kv_bytes"]["flat"]
    assert all(row["fi"] is None for row in theirs["points"])
    lines = [json.loads(line) for line in (tmp_path / REQUESTS).read_text().splitlines()]
    assert [(line["received_tokens"], line["error"]) for line in lines] == [(64, None)] * 48
    # A server that waits for a core may hand out all tokens of a stream at once, but not of every stream.
    streams = [times for line in lines for times in line["piece_ms"]]
    assert len(streams) == 4 * 48
    assert all(times[0] > 0 and times == sorted(times) for times in streams)
    assert sum(times[-1] > times[0] for times in streams) > len(streams) / 2
    assert "<svg" in (tmp_path / "report.html").read_text()
