# SPDX-License-Identifier: Apache-2.0
"""copy-llama through SGLang on the fi back end: an answer known in advance under every KV cache trick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import copy_questions
from sglang_cpu import SETTINGS
from sglang_engines import EngineError, run_engines

from models import copy_llama

sglang = pytest.importorskip("sglang", reason="SGLang is not installed")

pytestmark = pytest.mark.engine

LAYERS, ANSWER, CHUNK = 2, 24, 768
CONTEXTS = (60, 500, 1000, 4000, 8000)
SHORT = (60, 333, 1500)
FIRST, AGAIN, SHARED = range(3)
# Eight requests that SGLang takes back, some at a time, and prefills anew: it has a switch for that.
CROWDED, CROWD, CROWD_CONTEXT, CROWD_ANSWER = "requests taken back", 8, 300, 60

LONG_RUNS: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "page 16": {"page_size": 16},
    "page 64, mixed chunks": {"page_size": 64, "enable_mixed_chunk": True},
    "page 1, mixed chunks, no overlap": {"enable_mixed_chunk": True, "disable_overlap_schedule": True},
}
PREFILL, DECODE, OTHER = "prefill alone", "decode alone", "torch_native"
SHORT_RUNS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    PREFILL: {"attention_backend": "torch_native", "prefill_attention_backend": "fi"},
    DECODE: {"attention_backend": "torch_native", "decode_attention_backend": "fi"},
    OTHER: {"attention_backend": "torch_native"},
}
if sglang.__version__.startswith("0.5.17"):  # 0.5.23 wants its own kernels for them on a CPU, and AMX
    SHORT_RUNS["fp8 cache"] = {"kv_cache_dtype": "fp8_e4m3", "page_size": 16}
SABOTAGES = ("ignore_last_page", "drop_appends", "shorten_items")


def _engine(model: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model_path": str(model),
        "attention_backend": "fi",
        "dtype": "bfloat16",
        "context_length": 8192,
        "max_running_requests": 8,
        "max_total_tokens": 32768,
        "chunked_prefill_size": CHUNK,
        **changes,
    }


def _batch(prompts: list[list[int]], max_tokens: int = ANSWER) -> dict[str, Any]:
    return {"prompts": prompts, "max_tokens": max_tokens}


def _crowd() -> tuple[list[list[int]], list[list[int]]]:
    return copy_questions([CROWD_CONTEXT] * CROWD, CROWD_ANSWER, seed=1)


def _questions_about_one_text() -> tuple[list[list[int]], list[list[int]]]:
    text = copy_llama.text_without_repeats(4000, 99)
    pairs = [copy_llama.question(text, at, ANSWER) for at in (5, 2000, 3900)]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


@pytest.fixture(scope="module")
def results(
    copy_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Results by name of LONG_RUNS, SHORT_RUNS, CROWDED and SABOTAGES."""
    model = copy_model()
    prompts, _ = copy_questions(CONTEXTS, ANSWER)
    long = [_batch(prompts), _batch(prompts[-1:]), _batch(_questions_about_one_text()[0])]
    short = [_batch(copy_questions(SHORT, ANSWER)[0])]
    runs = {
        **{name: {"engine": _engine(model, **run), "batches": long} for name, run in LONG_RUNS.items()},
        **{name: {"engine": _engine(model, **run), "batches": short} for name, run in SHORT_RUNS.items()},
        CROWDED: {
            "engine": _engine(model, page_size=16, log_level="warning"),
            "batches": [_batch(_crowd()[0], CROWD_ANSWER)],
            "environment": {"SGLANG_TEST_RETRACT": "1"},
        },
        **{
            name: {
                "engine": _engine(model, page_size=16),
                "batches": short,
                "environment": {"SABOTAGE_OF_FI": name},
            }
            for name in SABOTAGES
        },
    }
    return run_engines(tmp_path_factory.mktemp("sglang"), runs, settings=SETTINGS)


def assert_served(result: Mapping[str, Any], layers: int = LAYERS) -> None:
    """Assert that fi computed every attention of the steps it was asked to plan, and that there were any."""
    stats = result["stats"]
    assert stats.engine.startswith("sglang ")
    assert stats.layers == layers
    assert stats.attention_calls == layers * stats.steps > 0
    assert stats.appended_tokens == stats.tokens > 0


each_long_run = pytest.mark.parametrize("name", LONG_RUNS)


@each_long_run
def test_every_attention_call_ran_on_fi(results: Any, name: str) -> None:
    assert_served(results[name])


@each_long_run
def test_answers_with_chunked_prefill(results: Any, name: str) -> None:
    _, answers = copy_questions(CONTEXTS, ANSWER)
    assert results[name]["batches"][FIRST]["tokens"] == answers
    # 8000 tokens cannot have been prefilled in fewer steps.
    assert results[name]["stats"].steps > 8000 // CHUNK


@each_long_run
def test_answer_from_the_radix_cache(results: Any, name: str) -> None:
    _, answers = copy_questions(CONTEXTS, ANSWER)
    again = results[name]["batches"][AGAIN]
    assert again["cached"][0] > 7000, "the repeated prompt was not found in the cache"
    assert again["tokens"] == answers[-1:]


@each_long_run
def test_answers_from_a_shared_prefix(results: Any, name: str) -> None:
    assert results[name]["batches"][SHARED]["tokens"] == _questions_about_one_text()[1]


@pytest.mark.parametrize("name", SHORT_RUNS)
def test_variants_give_the_answer(results: Any, name: str) -> None:
    assert results[name]["batches"][0]["tokens"] == copy_questions(SHORT, ANSWER)[1]


@pytest.mark.parametrize("name", [name for name in SHORT_RUNS if name != OTHER])
def test_variants_ran_on_fi(results: Any, name: str) -> None:
    assert_served(results[name])


def test_prefill_and_decode_alone_share_the_work(results: Any) -> None:
    prefill, decode = (results[name]["stats"] for name in (PREFILL, DECODE))
    prompts, _ = copy_questions(SHORT, ANSWER)
    # The first token of an answer comes from prefilling. One step more may be under way at the end.
    assert LAYERS * len(SHORT) * (ANSWER - 1) <= decode.tokens <= LAYERS * len(SHORT) * ANSWER
    assert prefill.tokens > LAYERS * sum(map(len, prompts)) * 0.9


def test_answers_of_requests_that_were_taken_back(results: Any) -> None:
    assert "Testing retraction" in results[CROWDED]["log"], "nothing was taken back"
    assert results[CROWDED]["batches"][0]["tokens"] == _crowd()[1]
    assert_served(results[CROWDED])


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_broken_back_end_changes_the_answer(results: Any, sabotage: str) -> None:
    """The tests of this file can fail: what is broken on purpose is seen in every answer."""
    assert results[sabotage]["stats"].attention_calls > 0
    answers = copy_questions(SHORT, ANSWER)[1]
    tokens = results[sabotage]["batches"][0]["tokens"]
    assert all(text != answer for text, answer in zip(tokens, answers, strict=True))


def test_another_back_end_is_not_counted(results: Any) -> None:
    """A run that fell back is recognised: right answer, no call counted."""
    assert results[OTHER]["stats"].attention_calls == 0
    with pytest.raises(AssertionError):
        assert_served(results[OTHER])


def test_what_cannot_run_is_refused_by_name(
    copy_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = {"engine": _engine(copy_model(), enable_torch_compile=True), "batches": []}
    with pytest.raises(EngineError, match=r"enable_torch_compile=True .*Choose another --attention-backend"):
        run_engines(tmp_path_factory.mktemp("refused"), {"refused": run}, settings=SETTINGS)
