# SPDX-License-Identifier: Apache-2.0
"""Windows, caps, slopes, sinks, scales and fp8 caches: the same numbers as vLLM's own CPU back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, assert_served, feature_prompts, prompt_logprobs

pytestmark = pytest.mark.engine

LAYERS = {"llama": 3, "mistral": 3, "gemma2": 4, "granite": 3, "bloom": 3}
TOLERANCE = 1e-3  # of a log-probability in float32; a softmax scale two percent off makes it far more
GENERATED = 24
BACK_ENDS = ("fi", "CPU_ATTN")


def _run(model: Path, back_end: str, **llm: Any) -> dict[str, Any]:
    sabotage = llm.pop("sabotage", None)
    arguments = {
        "model": str(model),
        "attention_backend": back_end,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "block_size": 32,
        "kv_cache_memory_bytes": 2**25,
        **llm,
    }
    batch = {"prompts": feature_prompts(), "max_tokens": GENERATED, "prompt_logprobs": True}
    return {"llm": arguments, "sabotage": sabotage, "batches": [batch]}


def _largest_difference(got: dict[str, Any], reference: dict[str, Any]) -> float:
    return max(
        abs(a - b)
        for kind in ("prompt_logprobs", "logprobs")
        for ours, theirs in zip(got["batches"][0][kind], reference["batches"][0][kind], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


NARROW = ("auto", "fp8", "fp8_e5m2")


@pytest.fixture(scope="module")
def results(engine: Engine, random_model: Callable[[str], Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by (kind of model or what else is run, back end); all engines share one import of vLLM."""
    llama = random_model("llama")
    runs = {(kind, back_end): _run(random_model(kind), back_end) for kind in LAYERS for back_end in BACK_ENDS}
    for dtype in NARROW:
        for back_end in BACK_ENDS:
            runs[dtype, back_end] = _run(llama, back_end, dtype="bfloat16", kv_cache_dtype=dtype)
    runs["louder", "fi"] = _run(llama, "fi", sabotage="louder_queries")
    return dict(zip(runs, engine(*runs.values()), strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_equal_to_vllms_own_back_end(results: Any, kind: str) -> None:
    """llama: grouped heads; mistral: window; gemma2: caps and windows; granite: sinks; bloom: ALiBi."""
    ours, reference = results[kind, "fi"], results[kind, "CPU_ATTN"]
    assert_served(ours, LAYERS[kind])
    assert reference["stats"]["attention_calls"] == 0
    assert ours["batches"][0]["tokens"] == reference["batches"][0]["tokens"]
    assert _largest_difference(ours, reference) < TOLERANCE


def test_a_scale_slightly_off_is_seen(results: Any) -> None:
    assert _largest_difference(results["louder", "fi"], results["llama", "CPU_ATTN"]) > 10 * TOLERANCE


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_kv_caches_lose_no_more_than_vllms_own(results: Any, dtype: str) -> None:
    """Rounding to these dtypes moves the numbers; it must not move ours further than vLLM's."""
    exact = prompt_logprobs(results["llama", "CPU_ATTN"])
    assert_served(results[dtype, "fi"], LAYERS["llama"])
    lost = [(prompt_logprobs(results[dtype, back_end]) - exact).abs().mean() for back_end in BACK_ENDS]
    assert 0 < lost[0] < 1.25 * lost[1], lost
