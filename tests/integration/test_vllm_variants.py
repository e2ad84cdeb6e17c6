# SPDX-License-Identifier: Apache-2.0
"""A variant of an installed package under vLLM, by its name: the model computes what the variant says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recency
from engines import Engine, assert_served, feature_prompts

pytestmark = pytest.mark.engine

GENERATED = 24


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
    llm = {
        "model": str(random_model("llama")),
        "attention_backend": "fi",
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "kv_cache_memory_bytes": 2**25,
    }
    runs = {"recency": {**llm, "additional_config": recency.ASKED}, "plain": llm}
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
    logprobs = [a + b for a, b in zip(scored["prompt_logprobs"], scored["logprobs"], strict=True)]
    recency.check(random_model("llama"), strength, feature_prompts(), scored["tokens"], logprobs)


def test_the_variant_changes_the_answers(results: Any) -> None:
    assert results["recency"]["batches"][0]["tokens"] != results["plain"]["batches"][0]["tokens"]
