# SPDX-License-Identifier: Apache-2.0
"""copy-llama through vLLM on the fi back end: an answer known in advance under every KV cache trick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Engine, assert_served, copy_questions

from models import copy_llama

pytestmark = pytest.mark.engine

LAYERS = 2
BYTES_A_TOKEN = {64: 2 * 2 * 64 * 2 * LAYERS, 128: 2 * 2 * 128 * 2 * LAYERS}  # K and V, 2 heads, bfloat16
SHAPES = ((64, 16), (64, 128), (128, 16), (128, 128))  # head_dim, block size
CONTEXTS = (60, 500, 1000, 4000, 8000)
# Eight requests whose prompts fit into the pool together, but not what they generate.
CROWD, CROWD_CONTEXT, CROWD_ANSWER = 8, 1000, 160
POOL_TOKENS = CROWD * (CROWD_CONTEXT + CROWD_ANSWER // 2)


def _arguments(model: Path, /, **overrides: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "attention_backend": "fi",
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 768,  # prefill of the longer prompts is chunked
        **overrides,
    }


def _batch(prompts: list[list[int]], answer_length: int) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": answer_length}


def _questions_about_one_text(context: int, answer_length: int) -> tuple[list[list[int]], list[list[int]]]:
    text = copy_llama.text_without_repeats(context, 99)
    pairs = [
        copy_llama.question(text, at, answer_length) for at in (5, context // 2, context - answer_length - 20)
    ]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


FIRST, AGAIN, SHARED, CROWDED = range(4)


@pytest.fixture(scope="module")
def long_runs(engine: Engine, copy_model: Callable[..., Path]) -> dict[tuple[int, int], dict[str, Any]]:
    """Results by (head_dim, block size); the batches of each are FIRST, AGAIN, SHARED, CROWDED."""
    prompts, _ = copy_questions(CONTEXTS, 24)
    crowd, _ = copy_questions([CROWD_CONTEXT] * CROWD, CROWD_ANSWER, seed=1)
    batches = [
        _batch(prompts, 24),
        _batch(prompts[-1:], 24),
        _batch(_questions_about_one_text(4000, 24)[0], 24),
        _batch(crowd, CROWD_ANSWER),
    ]
    results = engine(
        *(
            {
                "llm": _arguments(
                    copy_model(head_dim),
                    block_size=block_size,
                    kv_cache_memory_bytes=POOL_TOKENS * BYTES_A_TOKEN[head_dim],
                ),
                "batches": batches,
            }
            for head_dim, block_size in SHAPES
        )
    )
    return dict(zip(SHAPES, results, strict=True))


each_shape = pytest.mark.parametrize("shape", SHAPES, ids="d{0[0]}-b{0[1]}".format)


@each_shape
def test_every_attention_call_ran_on_fi(long_runs: Any, shape: tuple[int, int]) -> None:
    assert_served(long_runs[shape], LAYERS)


@each_shape
def test_answers_with_chunked_prefill(long_runs: Any, shape: tuple[int, int]) -> None:
    _, answers = copy_questions(CONTEXTS, 24)
    assert long_runs[shape]["batches"][FIRST]["tokens"] == answers
    # 8000 tokens cannot have been prefilled in fewer steps.
    assert long_runs[shape]["stats"]["steps"] > 8000 // 768


@each_shape
def test_answer_from_a_cached_prefix(long_runs: Any, shape: tuple[int, int]) -> None:
    _, answers = copy_questions(CONTEXTS, 24)
    again = long_runs[shape]["batches"][AGAIN]
    assert again["cached"][0] > 7000, "the repeated prompt was not found in the cache"
    assert again["tokens"] == answers[-1:]


@each_shape
def test_answers_from_a_prefix_shared_in_one_step(long_runs: Any, shape: tuple[int, int]) -> None:
    """Rows of one step read blocks that another row of the same step writes."""
    shared = long_runs[shape]["batches"][SHARED]
    assert shared["tokens"] == _questions_about_one_text(4000, 24)[1]


@each_shape
def test_answers_after_preemption(long_runs: Any, shape: tuple[int, int]) -> None:
    _, answers = copy_questions([CROWD_CONTEXT] * CROWD, CROWD_ANSWER, seed=1)
    assert long_runs[shape]["metrics"]["num_preemptions"] > 0, "the pool was not small enough to preempt"
    assert long_runs[shape]["batches"][CROWDED]["tokens"] == answers


def test_other_ways_to_run(engine: Engine, copy_model: Callable[..., Path]) -> None:
    """Other dtypes, head and block sizes, and n-gram speculation."""
    prompts, answers = copy_questions((60, 333, 1500), 32)
    small = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**24, "block_size": 16}
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 3}
    variants: dict[str, dict[str, Any]] = {
        "float16": {"dtype": "float16"},
        "float32": {"dtype": "float32"},
        "256-wide heads": {"model": str(copy_model(256))},
        "blocks of 8": {"block_size": 8},
        "blocks of 24": {"block_size": 24},
        "a mixed-case name": {"attention_backend": "Fi"},
        # Last: it loads numba, with which vLLM starts no second engine in a process.
        "n-gram speculation": {"speculative_config": ngram},
    }
    runs = [
        {"llm": _arguments(copy_model(64), **{**small, **variant}), "batches": [_batch(prompts, 32)] * 2}
        for variant in variants.values()
    ]
    for name, result in zip(variants, engine(*runs), strict=True):
        assert [batch["tokens"] for batch in result["batches"]] == [answers, answers], name
        assert_served(result, LAYERS)
        if name == "n-gram speculation":
            assert result["metrics"]["spec_decode_num_accepted_tokens"] > 30, "nothing was speculated"
            assert result["stats"]["steps"] < 2 * 32


@pytest.mark.parametrize("sabotage", ["ignore_last_page", "drop_appends"])
def test_a_broken_back_end_changes_the_answer(
    engine: Engine, copy_model: Callable[..., Path], sabotage: str
) -> None:
    """The tests of this file can fail: what is broken on purpose is seen."""
    prompts, answers = copy_questions((60, 1000), 16)
    run = {
        "llm": _arguments(copy_model(64), max_model_len=2048, kv_cache_memory_bytes=2**24, block_size=16),
        "sabotage": sabotage,
        "batches": [_batch(prompts, 16)],
    }
    (result,) = engine(run)
    assert_served(result, LAYERS)
    for got, answer in zip(result["batches"][0]["tokens"], answers, strict=True):
        assert got != answer


def test_another_back_end_is_not_counted(engine: Engine, copy_model: Callable[..., Path]) -> None:
    """A run that fell back is recognised: right answer, no call counted."""
    prompts, answers = copy_questions((60,), 8)
    llm = _arguments(copy_model(64), max_model_len=1024, kv_cache_memory_bytes=2**23, block_size=32)
    (result,) = engine({"llm": {**llm, "attention_backend": "CPU_ATTN"}, "batches": [_batch(prompts, 8)]})
    assert result["batches"][0]["tokens"] == answers
    assert result["stats"]["attention_calls"] == 0
    with pytest.raises(AssertionError):
        assert_served(result, LAYERS)
