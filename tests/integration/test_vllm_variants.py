# SPDX-License-Identifier: Apache-2.0
"""A variant of an installed package under vLLM, by its name: the model computes what the variant says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recency
from engines import Engine, assert_served, feature_prompts, one_core_each

from fi_backend.core.counters import read_stats

pytestmark = pytest.mark.engine

GENERATED = 24


def _llm(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "attention_backend": "fi",
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "kv_cache_memory_bytes": 2**25,
        **changes,
    }


def _check(result: dict[str, Any], model: Path, strength: float) -> None:
    scored = result["batches"][0]
    logprobs = [a + b for a, b in zip(scored["prompt_logprobs"], scored["logprobs"], strict=True)]
    recency.check(model, strength, feature_prompts(), scored["tokens"], logprobs)


@pytest.fixture(scope="module")
def results(
    engine: Engine, random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results with the variant and without it; prompts come in chunks, the second time from the cache."""
    prompts = feature_prompts()
    batches = [
        {"prompts": prompts, "max_tokens": GENERATED, "prompt_logprobs": True},
        {"prompts": prompts, "max_tokens": GENERATED},
    ]
    model = random_model("llama")
    runs = {"recency": _llm(model, additional_config=recency.ASKED), "plain": _llm(model)}
    path = recency.installed(tmp_path_factory.mktemp("installed"))
    made = engine(
        *({"name": name, "llm": run, "batches": batches} for name, run in runs.items()),
        environment={"PYTHONPATH": path},
    )
    return dict(zip(runs, made, strict=True))


@pytest.mark.parametrize(("name", "strength"), [("recency", recency.STRENGTH), ("plain", 0.0)])
def test_the_model_computes_what_the_variant_says(
    results: Any, random_model: Callable[[str], Path], name: str, strength: float
) -> None:
    result = results[name]
    assert_served(result, layers=3)
    scored, cached = result["batches"]
    assert sum(cached["cached"]) > 500
    assert cached["tokens"] == scored["tokens"]
    _check(result, random_model("llama"), strength)
    # All runs share one log.
    assert result["log"].count("run the variant recency, plug-in 'recency_attention'; the first is") == 1


def test_the_variant_changes_the_answers(results: Any) -> None:
    assert results["recency"]["batches"][0]["tokens"] != results["plain"]["batches"][0]["tokens"]


def test_each_process_has_its_part_of_the_heads(
    engine: Engine, random_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two workers that find the package by themselves; the model's configuration asks for the variant."""
    model = random_model("llama")
    llm = _llm(model, tensor_parallel_size=2, hf_overrides=recency.ASKED)
    batch = {"prompts": feature_prompts(), "max_tokens": GENERATED, "prompt_logprobs": True}
    environment = {
        "PYTHONPATH": recency.installed(tmp_path / "installed"),
        "VLLM_CPU_OMP_THREADS_BIND": one_core_each(2),
        "FI_BACKEND_STATS_DIR": str(tmp_path / "stats"),
    }
    (result,) = engine({"llm": llm, "batches": [batch]}, in_process=False, environment=environment)
    _check(result, model, recency.STRENGTH)
    workers = [stats for stats in read_stats(tmp_path / "stats") if stats.layers]
    assert [stats.layers for stats in workers] == [3, 3]
    assert all(stats.attention_calls == 3 * stats.steps > 0 for stats in workers)
