# SPDX-License-Identifier: Apache-2.0
"""copy-llama through vLLM on the fi back end: an answer known in advance under every KV cache trick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, assert_served, copy_questions

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


ANSWER = 32
SABOTAGES = ("ignore_last_page", "drop_appends", "shorten_items")
DRAFTED = "a draft model"
SMALL = {"max_model_len": 2048, "kv_cache_memory_bytes": 2**24, "block_size": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "256-wide heads": {"head_dim": 256},
    "blocks of 8": {"block_size": 8},
    "blocks of 24": {"block_size": 24},
    "a mixed-case name": {"attention_backend": "Fi"},
    # Blocks of all layers, or of one head of all layers, lie together: nothing is contiguous.
    "layout BLNHC": {"environment": {"VLLM_KV_CACHE_LAYOUT": "BLNHC"}},
    "layout BHLNC": {"environment": {"VLLM_KV_CACHE_LAYOUT": "BHLNC"}},
    **{name: {"sabotage": name} for name in SABOTAGES},
    "CPU_ATTN": {"attention_backend": "CPU_ATTN", "block_size": 32},
    DRAFTED: {
        "speculative_config": {
            "method": "draft_model",
            "model": "the model itself",
            "num_speculative_tokens": 3,
            "attention_backend": "FI",
        }
    },
    # Last: it loads numba, after which vLLM starts no second engine in a process.
    "n-gram speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 3,
        }
    },
}


@pytest.fixture(scope="module")
def variants(engine: Engine, copy_model: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """Results by name of VARIANTS; each asks the same questions twice."""
    prompts, _ = copy_questions((60, 333, 1500), ANSWER)
    runs = []
    for variant in VARIANTS.values():
        changes = dict(variant)
        run = {key: changes.pop(key) for key in ("sabotage", "environment") if key in changes}
        model = copy_model(changes.pop("head_dim", 64))
        llm = _arguments(model, **{**SMALL, **changes})
        if "model" in llm.get("speculative_config", ()):
            llm["speculative_config"] = {**llm["speculative_config"], "model": str(model)}
        runs.append({**run, "llm": llm, "batches": [_batch(prompts, ANSWER)] * 2})
    return dict(zip(VARIANTS, engine(*runs), strict=True))


def _texts(result: dict[str, Any]) -> list[list[list[int]]]:
    return [batch["tokens"] for batch in result["batches"]]


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("CPU_ATTN", DRAFTED, *SABOTAGES)])
def test_variants_give_the_answer(variants: Any, name: str) -> None:
    _, answers = copy_questions((60, 333, 1500), ANSWER)
    assert _texts(variants[name]) == [answers, answers]
    assert_served(variants[name], LAYERS)


def test_layouts_were_honoured(variants: Any) -> None:
    for layout in ("BLNHC", "BHLNC"):
        assert f"Using {layout} KV cache layout" in variants[f"layout {layout}"]["log"]


def test_speculation_was_accepted(variants: Any) -> None:
    result = variants["n-gram speculation"]
    assert result["metrics"]["spec_decode_num_accepted_tokens"] > ANSWER
    assert result["stats"]["steps"] < 2 * ANSWER, "every token took a step of its own"


def test_a_draft_model_runs_on_fi_too(variants: Any) -> None:
    """It drafts what it would itself answer, so whatever it reads wrongly costs accepted tokens."""
    _, answers = copy_questions((60, 333, 1500), ANSWER)
    result = variants[DRAFTED]
    assert _texts(result) == [answers, answers]
    assert result["stats"]["layers"] == 2 * LAYERS
    assert result["stats"]["attention_calls"] == LAYERS * result["stats"]["plans"] > 0
    accepted, drafted = (
        result["metrics"][f"spec_decode_num_{kind}_tokens"] for kind in ("accepted", "draft")
    )
    assert accepted > 0.95 * drafted


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_broken_back_end_changes_the_answer(variants: Any, sabotage: str) -> None:
    """The tests of this file can fail: what is broken on purpose is seen in every answer.

    Two sabotages change what the back end is told, the third what the native kernels execute.
    """
    _, answers = copy_questions((60, 333, 1500), ANSWER)
    assert_served(variants[sabotage], LAYERS)
    for texts in _texts(variants[sabotage]):
        assert all(text != answer for text, answer in zip(texts, answers, strict=True))


def test_another_back_end_is_not_counted(variants: Any) -> None:
    """A run that fell back is recognised: right answer, no call counted."""
    _, answers = copy_questions((60, 333, 1500), ANSWER)
    assert _texts(variants["CPU_ATTN"]) == [answers, answers]
    assert variants["CPU_ATTN"]["stats"]["attention_calls"] == 0
    with pytest.raises(AssertionError):
        assert_served(variants["CPU_ATTN"], LAYERS)
