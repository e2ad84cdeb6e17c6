# SPDX-License-Identifier: Apache-2.0
"""Engines of several processes: tensor parallelism, and `vllm serve` over HTTP as the demo runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine, copy_questions, one_core_each

from fi_backend.core.counters import read_stats

pytestmark = pytest.mark.engine

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"


def test_tensor_parallel(engine: Engine, copy_model: Callable[..., Path], tmp_path: Path) -> None:
    """Two workers with one KV head each, both counted by the statistics files they leave."""
    prompts, answers = copy_questions((60, 1000), 24)
    run = {
        "llm": {
            "model": str(copy_model(64)),
            "attention_backend": "fi",
            "tensor_parallel_size": 2,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "block_size": 16,
            "kv_cache_memory_bytes": 2**23,
        },
        "batches": [{"prompts": prompts, "max_tokens": 24}],
    }
    environment = {"VLLM_CPU_OMP_THREADS_BIND": one_core_each(2), "FI_BACKEND_STATS_DIR": str(tmp_path)}
    (result,) = engine(run, in_process=False, environment=environment)
    assert result["batches"][0]["tokens"] == answers
    workers = [stats for stats in read_stats(tmp_path) if stats.layers]
    assert len(workers) == 2
    for stats in workers:
        assert stats.engine.startswith("vllm ")
        assert stats.attention_calls == stats.layers * stats.steps > 0


def test_demo_serves_over_http() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = [sys.executable, str(DEMO)]
    demo = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    line = r"back end fi served (\d+) attention calls \(2 layers x (\d+) steps\); answer correct"
    found = re.search(line, demo.stdout)
    assert found, demo.stdout
    assert int(found[1]) == 2 * int(found[2]) > 0
