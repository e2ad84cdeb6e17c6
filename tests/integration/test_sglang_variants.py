# SPDX-License-Identifier: Apache-2.0
"""A variant of an installed package under SGLang, by its name: the model computes what the variant says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import recency
from engines import feature_prompts
from sglang_cpu import SETTINGS
from sglang_engines import run_engines

pytest.importorskip("sglang", reason="SGLang is not installed")

pytestmark = pytest.mark.engine

GENERATED = 24
# A scheduler of SGLang prefills one token at the least beside what it finds in its cache.
PROMPTS = [prompt for prompt in feature_prompts() if len(prompt) > 1]


@pytest.fixture(scope="module")
def results(
    random_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results with the variant and without it; prompts come in chunks, the second time from the cache."""
    engine = {
        "model_path": str(random_model("llama")),
        "attention_backend": "fi",
        "dtype": "float32",
        "context_length": 1024,
        "max_running_requests": 4,
        "max_total_tokens": 8192,
        "chunked_prefill_size": 256,
        "page_size": 16,
        "log_level": "info",
    }
    batches = [{"prompts": PROMPTS, "max_tokens": GENERATED, "logprobs": True}] * 2
    arguments = {"recency": {"json_model_override_args": json.dumps(recency.ASKED)}, "plain": {}}
    runs = {name: {"engine": {**engine, **given}, "batches": batches} for name, given in arguments.items()}
    path = recency.installed(tmp_path_factory.mktemp("installed"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        return run_engines(tmp_path_factory.mktemp("sglang"), runs, settings=SETTINGS)


@pytest.mark.parametrize(("name", "strength"), [("recency", recency.STRENGTH), ("plain", 0.0)])
def test_the_model_computes_what_the_variant_says(
    results: Any, random_model: Callable[[str], Path], name: str, strength: float
) -> None:
    stats = results[name]["stats"]
    assert stats.layers == 3
    log = results[name]["log"]  # of all runs
    assert log.count("run the variant recency, plug-in 'recency_attention'; the first is") == 1
    assert stats.attention_calls == 3 * stats.steps > 0
    first, cached = results[name]["batches"]
    assert sum(cached["cached"]) > 500
    assert cached["tokens"] == first["tokens"]
    for batch in (first, cached):
        recency.check(random_model("llama"), strength, PROMPTS, batch["tokens"], batch["logprobs"])


def test_the_variant_changes_the_answers(results: Any) -> None:
    assert results["recency"]["batches"][0]["tokens"] != results["plain"]["batches"][0]["tokens"]
