# SPDX-License-Identifier: Apache-2.0
"""Windows, caps, slopes, sinks, scales and fp8 caches: the same numbers as vLLM's own CPU back end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Engine, assert_served

from models import copy_llama, random_models

pytestmark = pytest.mark.engine

LAYERS = {"llama": 3, "mistral": 3, "gemma2": 4, "granite": 3, "bloom": 3}
TOLERANCE = 1e-3  # of a log-probability in float32; a softmax scale two percent off makes it far more
GENERATED = 24


def _prompts() -> list[list[int]]:
    """Short, longer than the sliding windows, and longer than a step's budget of tokens."""
    lengths = (1, 7, random_models.WINDOW - 3, random_models.WINDOW + 3, 150, 500)
    return [list(copy_llama.text_without_repeats(max(length, 2), length))[:length] for length in lengths]


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
    batch = {"prompts": _prompts(), "max_tokens": GENERATED, "prompt_logprobs": True}
    return {"llm": arguments, "sabotage": sabotage, "batches": [batch]}


def _largest_difference(got: dict[str, Any], reference: dict[str, Any]) -> float:
    return max(
        abs(a - b)
        for kind in ("prompt_logprobs", "logprobs")
        for ours, theirs in zip(got["batches"][0][kind], reference["batches"][0][kind], strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module")
def pairs(engine: Engine, random_model: Callable[[str], Path]) -> dict[str, tuple[Any, Any]]:
    """Results of (fi, CPU_ATTN) by kind of model."""
    runs = [_run(random_model(kind), back_end) for kind in LAYERS for back_end in ("fi", "CPU_ATTN")]
    results = engine(*runs)
    return dict(zip(LAYERS, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_equal_to_vllms_own_back_end(pairs: Any, kind: str) -> None:
    """llama: grouped heads; mistral: window; gemma2: caps and windows; granite: sinks; bloom: ALiBi."""
    ours, reference = pairs[kind]
    assert_served(ours, LAYERS[kind])
    assert reference["stats"]["attention_calls"] == 0
    assert ours["batches"][0]["tokens"] == reference["batches"][0]["tokens"]
    assert _largest_difference(ours, reference) < TOLERANCE


def test_a_scale_slightly_off_is_seen(
    pairs: Any, engine: Engine, random_model: Callable[[str], Path]
) -> None:
    (louder,) = engine(_run(random_model("llama"), "fi", sabotage="louder_queries"))
    assert _largest_difference(louder, pairs["llama"][1]) > 10 * TOLERANCE


NARROW = ("auto", "fp8", "fp8_e5m2")


@pytest.fixture(scope="module")
def narrow_caches(engine: Engine, random_model: Callable[[str], Path]) -> dict[str, tuple[Any, Any]]:
    """Results of (fi, CPU_ATTN) in bfloat16 by the dtype of the KV cache."""
    runs = [
        _run(random_model("llama"), back_end, dtype="bfloat16", kv_cache_dtype=dtype)
        for dtype in NARROW
        for back_end in ("fi", "CPU_ATTN")
    ]
    results = engine(*runs)
    return dict(zip(NARROW, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_kv_caches_lose_no_more_than_vllms_own(pairs: Any, narrow_caches: Any, dtype: str) -> None:
    """Rounding to these dtypes moves the numbers; it must not move ours further than vLLM's."""
    exact = _prompt_logprobs(pairs["llama"][1])
    ours, theirs = narrow_caches[dtype]
    assert_served(ours, LAYERS["llama"])
    lost = [(_prompt_logprobs(result) - exact).abs().mean() for result in (ours, theirs)]
    assert 0 < lost[0] < 1.25 * lost[1], lost


def _prompt_logprobs(result: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([value for prompt in result["batches"][0]["prompt_logprobs"] for value in prompt])
