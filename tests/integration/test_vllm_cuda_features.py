# SPDX-License-Identifier: Apache-2.0
"""Windows, caps, slopes, sinks, fp8 caches on a GPU: no further from float32 than vLLM's Triton back end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, feature_prompts, prompt_logprobs, result_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# llama: grouped heads; mistral: windows; gemma2: caps, and two groups of caches, one windowed; bloom: ALiBi.
HEAD_DIMS = {"llama": 64, "mistral": 80, "gemma2": 64, "bloom": 64, "sinks": 64}
NARROW = ("fp8", "fp8_e5m2")
REFERENCE, THEIRS, EAGER, GRAPHS = "Triton float32", "Triton bfloat16", "fi eager", "fi FULL"
# Every step of at most 256 tokens is replayed from a graph, so the prompts are prefilled by graphs too.
FULL = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 4, 8, 32, 64, 128, 256]}
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {"attention_backend": "TRITON_ATTN", "dtype": "float32"},
    THEIRS: {"attention_backend": "TRITON_ATTN"},
    EAGER: {"attention_backend": "FI"},
    GRAPHS: {"attention_backend": "FI", "enforce_eager": False, "compilation_config": FULL},
}


@pytest.fixture(scope="module")
def results(
    engine: Engine,
    random_model: Callable[..., Path],
    chosen_runs: Callable[..., list[str]],
    pytestconfig: Any,
) -> Callable[[str], dict[str, Any]]:
    """Return the function ("<kind>: <way>") -> result; all chosen runs are over by then.

    A way is compared with two others, so that `--vllm-runs "llama:;sinks:"` chooses by kind.
    """
    batch = {"prompts": feature_prompts(), "max_tokens": 8, "prompt_logprobs": True}
    runs = {}
    for kind in (*HEAD_DIMS, *NARROW):
        base = kind if kind in HEAD_DIMS and kind != "sinks" else "llama"
        for way, changes in WAYS.items():
            if kind in NARROW and way == REFERENCE:
                continue
            llm = {
                "model": str(random_model(base, HEAD_DIMS.get(kind, 64))),
                "dtype": "bfloat16",
                "max_model_len": 1024,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 256,
                "block_size": 16,
                "kv_cache_memory_bytes": 2**26,
                "kv_cache_dtype": kind if kind in NARROW else "auto",
                **changes,
            }
            name = f"{kind}: {way}"
            runs[name] = {"name": name, "llm": llm, "sinks": kind == "sinks", "batches": [batch]}
    names = chosen_runs(runs)
    limit = pytestconfig.getoption("--vllm-limit")
    made = engine(*(runs[name] for name in names), keep_going=True, seconds=limit) if names else []
    found = dict(zip(names, made, strict=True))
    return partial(result_of, found)


def _lost(results: Any, kind: str, way: str) -> float:
    """Return how far the log-probabilities lie from float32's, in the mean."""
    exact = prompt_logprobs(results(f"{'llama' if kind in NARROW else kind}: {REFERENCE}"))
    return float((prompt_logprobs(results(f"{kind}: {way}")) - exact).abs().mean())


@pytest.mark.parametrize("way", [EAGER, GRAPHS])
@pytest.mark.parametrize("kind", [*HEAD_DIMS, *NARROW])
def test_no_further_from_float32_than_triton(results: Any, kind: str, way: str) -> None:
    ours, theirs = _lost(results, kind, way), _lost(results, kind, THEIRS)
    print(f"{kind}: {way} {ours:.5f}, Triton {theirs:.5f}")
    assert 0 < ours < 1.25 * theirs


@pytest.mark.parametrize("way", [EAGER, GRAPHS])
@pytest.mark.parametrize("kind", [*HEAD_DIMS, *NARROW])
def test_fi_served(results: Any, kind: str, way: str) -> None:
    stats = results(f"{kind}: {way}")["stats"]
    calls = stats["attention_calls"] + stats["replayed_calls"] + stats["captured_calls"]
    assert calls == stats["layers"] * stats["steps"] > 0
    assert (stats["replayed_calls"] > 0) == (way == GRAPHS)


def test_sinks_matter(results: Any) -> None:
    """Else the run with sinks would pass without them."""
    without = prompt_logprobs(results(f"llama: {REFERENCE}"))
    moved = float((prompt_logprobs(results(f"sinks: {REFERENCE}")) - without).abs().mean())
    assert moved > 5 * _lost(results, "sinks", THEIRS)
