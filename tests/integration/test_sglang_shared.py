# SPDX-License-Identifier: Apache-2.0
"""Prompts that branch like a tree, through SGLang on the CPU: prefixes are read once, answers stay.

In most runs every forest that comes from the radix tree is compared with the rows of the token table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sglang_cpu import SETTINGS
from sglang_engines import run_engines

from models import copy_llama

sglang = pytest.importorskip("sglang", reason="SGLang is not installed")

pytestmark = pytest.mark.engine

REQUESTS, ANSWER = 8, 40
# Bytes of the text at each level of the tree, and how many branches the level has.
TWO_LEVELS = ((1200, 1), (600, 2))
THREE_LEVELS = ((1000, 1), (500, 2), (400, 2))
COMPARED = {"SABOTAGE_OF_FI": "compare_forests"}
OFF = {"FI_BACKEND_WITHOUT": "sharing"}

# levels, environment, the rest: arguments of sglang.Engine.
RUNS: dict[str, dict[str, Any]] = {
    "two levels, page 1": {"levels": TWO_LEVELS, "environment": COMPARED},
    "three levels, page 16, mixed chunks": {
        "levels": THREE_LEVELS,
        "environment": COMPARED,
        "page_size": 16,
        "enable_mixed_chunk": True,
        "chunked_prefill_size": 256,
    },
    "three levels, page 64, no overlap": {
        "levels": THREE_LEVELS,
        # The tree that is the only one in 0.5.23; 0.5.17 has it for hybrid caches.
        "environment": {**COMPARED, "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"},
        "page_size": 64,
        "disable_overlap_schedule": True,
    },
    "two levels, small pool, requests taken back": {
        "levels": TWO_LEVELS,
        "environment": {**COMPARED, "SGLANG_TEST_RETRACT": "1"},
        "page_size": 16,
        "max_total_tokens": 4096,
        "log_level": "warning",
    },
    "two levels, page 16, switched off": {"levels": TWO_LEVELS, "environment": OFF, "page_size": 16},
    "three levels, torch_native": {"levels": THREE_LEVELS, "attention_backend": "torch_native"},
}
SHARING = [name for name in RUNS if "off" not in name and "native" not in name]
STEADY = [name for name in SHARING if "taken back" not in name]


def prompts(levels: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Return a prompt for each leaf of the tree, to fill the cache, then all questions and their answers."""
    texts, seed = [b""], 0
    for length, branches in levels:
        grown = []
        for text in texts:
            for _ in range(branches):
                seed += 1
                grown.append(copy_llama.text_without_repeats(len(text) + length, seed, after=text))
        texts = grown
    room = len(texts[0]) - ANSWER - 20
    pairs = [
        copy_llama.question(texts[i % len(texts)], 5 + i * (room // REQUESTS), ANSWER)
        for i in range(REQUESTS)
    ]
    warm = [copy_llama.question(text, room, ANSWER)[0] for text in texts]
    return warm, [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def saved_by_a_step(texts: list[list[int]], page_size: int) -> int:
    """Tokens in whole pages that a step of all requests need not read again, by the prompts alone."""
    pages: dict[tuple[int, tuple[int, ...]], int] = {}
    total = 0
    for text in texts:
        node = 0
        for begin in range(0, len(text) - page_size + 1, page_size):
            node = pages.setdefault((node, tuple(text[begin : begin + page_size])), len(pages) + 1)
            total += 1
    return (total - len(pages)) * page_size


@pytest.fixture(scope="module")
def results(
    copy_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    model, runs = str(copy_model()), {}
    for name, changes in RUNS.items():
        engine = {
            "model_path": model,
            "attention_backend": "fi",
            "dtype": "bfloat16",
            "context_length": 4096,
            "max_running_requests": REQUESTS,
            "max_total_tokens": 32768,
            "chunked_prefill_size": 768,
            **changes,
        }
        warm, questions, _ = prompts(engine.pop("levels"))
        runs[name] = {
            "environment": engine.pop("environment", {}),
            "engine": engine,
            "batches": [
                {"prompts": warm, "max_tokens": 2},
                {"prompts": questions, "max_tokens": ANSWER},
            ],
        }
    return run_engines(tmp_path_factory.mktemp("shared"), runs, settings=SETTINGS)


@pytest.mark.parametrize("name", RUNS)
def test_answers(results: Any, name: str) -> None:
    _, _, answers = prompts(RUNS[name]["levels"])
    assert results[name]["batches"][1]["tokens"] == answers


def test_sharing_changes_no_token(results: Any) -> None:
    """Also where a step was composed, the tokens are those of SGLang's own back end."""
    own = results["three levels, torch_native"]["batches"]
    for name in ("three levels, page 16, mixed chunks", "three levels, page 64, no overlap"):
        assert [batch["tokens"] for batch in results[name]["batches"]] == [batch["tokens"] for batch in own]


@pytest.mark.parametrize("name", STEADY)
def test_reads_fall_as_the_tree_predicts(results: Any, name: str) -> None:
    stats = results[name]["stats"]
    _, questions, _ = prompts(RUNS[name]["levels"])
    step = saved_by_a_step(questions, RUNS[name].get("page_size", 1))
    assert step > 0.5 * sum(map(len, questions)), "more than half of all reads are the same"
    # All requests decode together, but for the first and the last steps.
    decoding = ANSWER - 1
    assert 0.9 * (decoding - 3) * step < stats.kv_tokens_saved < (decoding + 8) * step
    assert decoding - 3 <= stats.shared_plans <= stats.plans


def test_requests_that_were_taken_back_share_again(results: Any) -> None:
    result = results["two levels, small pool, requests taken back"]
    assert sum(result["batches"][1]["retractions"]) > 0
    assert result["stats"].kv_tokens_saved > 0


@pytest.mark.parametrize("name", [name for name in RUNS if name not in SHARING])
def test_nothing_is_shared_elsewhere(results: Any, name: str) -> None:
    assert results[name]["stats"].kv_tokens_saved == 0


@pytest.mark.parametrize("name", [name for name in RUNS if "native" not in name])
def test_fi_served_every_layer_of_every_step(results: Any, name: str) -> None:
    stats = results[name]["stats"]
    assert stats.attention_calls == 2 * stats.steps > 0
