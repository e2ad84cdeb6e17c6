# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on GPUs: copy-llama with its heads in two processes, by itself and under load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, copy_questions
from test_vllm_cuda import ANSWER, CONTEXTS, FULL, LAYERS, PIECEWISE, V1

from fi_backend import env
from fi_backend.core.counters import read_stats

RANKS = 2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices"),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_copy.py"
RUNS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "FULL": {"compilation_config": FULL},
    "FULL_AND_PIECEWISE": {"compilation_config": PIECEWISE},
    "V1 runner, FULL": {"compilation_config": FULL, "environment": V1},
}


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_serves_every_layer(
    engine: Engine, copy_model: Callable[..., Path], chosen_runs: Any, tmp_path: Path, name: str
) -> None:
    """Each of two processes has one KV head; both count in files of their own."""
    if not chosen_runs([name]):
        pytest.skip("not chosen by --vllm-runs")
    prompts, answers = copy_questions(CONTEXTS, ANSWER)
    llm = {
        "model": str(copy_model(128)),
        "attention_backend": "FI",
        "tensor_parallel_size": RANKS,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": len(prompts),
        "max_num_batched_tokens": 1024,
        "block_size": 16,
        "kv_cache_memory_bytes": 2**28,
        **RUNS[name],
    }
    environment = {**llm.pop("environment", {}), env.STATS_DIR.name: str(tmp_path)}
    run = {"name": name, "llm": llm, "batches": [{"prompts": prompts, "max_tokens": ANSWER}]}
    (result,) = engine(run, in_process=False, environment=environment)
    assert result["batches"][0]["tokens"] == answers
    workers = [stats for stats in read_stats(tmp_path) if stats.layers]
    assert [stats.layers for stats in workers] == [LAYERS] * RANKS
    for stats in workers:
        calls = stats.attention_calls + stats.replayed_calls + stats.captured_calls
        assert calls == LAYERS * stats.steps > 0
        assert (stats.replayed_calls > 0) == (name != "eager")


@pytest.mark.parametrize("options", [[], ["--eager"]], ids=["graphs", "eager"])
def test_answers_under_load(tmp_path: Path, options: list[str]) -> None:
    """With preemptions and clients that hang up, which the script demands."""
    command = [sys.executable, str(SCRIPT), f"--server=--tensor-parallel-size={RANKS}", *options]
    child = subprocess.run(
        [*command, f"--log={tmp_path / 'server.log'}"],
        capture_output=True,
        text=True,
        env=env.child_environment(),
        timeout=900,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    [line] = child.stdout.splitlines()
    record = json.loads(line)
    assert (record["ranks"], record["fi_ranks"], record["fi_layers"]) == (RANKS, RANKS, RANKS * LAYERS)
    assert (record["replayed_calls"] > 0) == (not options)
