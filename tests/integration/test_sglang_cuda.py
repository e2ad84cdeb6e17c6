# SPDX-License-Identifier: Apache-2.0
"""copy-llama through SGLang on a GPU: the known answers, eager and from CUDA graphs.

One engine for each configuration, in a process that is killed when it takes too long:

    pytest tests/integration/test_sglang_cuda.py -s --sglang-runs "graphs, 1;eager" --sglang-limit 200
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import copy_questions
from sglang_engines import EngineError, run_engines

from models import copy_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    # An engine that is unpacked, not installed, has no versions to compare.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}
LAYERS, ANSWER, CONCURRENT, CHUNK = 2, 24, 64, 1024
# 64 requests of mixed length; those beyond a step's budget of tokens are prefilled in chunks.
CONTEXTS = [40 + (index * 389) % 2900 for index in range(CONCURRENT)]
MIXED, AGAIN, SHARED, ALONE = range(4)
SIZES = [1, 2, 4, 8, 16, 32, 64]
EAGER = {"disable_cuda_graph": True}
DRAFTS = {
    "speculative_algorithm": "STANDALONE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Changes nothing, but has kernels of its own; copy-llama has four heads.
VARIANT = {"fi_backend": {"variant": "output_scale", "variant_args": {"scale": [1.0] * 4}}}
TREES = {**DRAFTS, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}

# environment: variables; the rest: arguments of sglang.Engine.
RUNS: dict[str, dict[str, Any]] = {
    "eager, 1": {**EAGER, "environment": {"FI_BACKEND_DEBUG": "1"}},
    "eager, 16, mixed chunks": {**EAGER, "page_size": 16, "enable_mixed_chunk": True},
    "graphs, 1": {},
    "graphs, 16, mixed chunks": {"page_size": 16, "enable_mixed_chunk": True},
    "graphs, 64": {"page_size": 64},
    "graphs, 16, no overlap": {"page_size": 16, "disable_overlap_schedule": True},
    "graphs of decoding alone, 16": {"page_size": 16, "disable_prefill_cuda_graph": True},
    "graphs, 16, small pool": {"page_size": 16, "max_total_tokens": 16384, "schedule_conservativeness": 0.1},
    "graphs, 16, taken back": {"page_size": 16, "environment": {"SGLANG_TEST_RETRACT": "1"}},
    "graphs, 16, fp8 cache": {"page_size": 16, "kv_cache_dtype": "fp8_e4m3"},
    "graphs, 16, deterministic": {"page_size": 16, "enable_deterministic_inference": True},
    "graphs, 16, variant": {
        "page_size": 16,
        "json_model_override_args": json.dumps(VARIANT),
        "log_level": "info",
    },
    "prefill alone, 1": {"attention_backend": "triton", "prefill_attention_backend": "fi"},
    "decode alone, 1": {"attention_backend": "triton", "decode_attention_backend": "fi"},
    "drafts in chains, 1": DRAFTS,
    "drafts in chains, eager, 1": {**DRAFTS, **EAGER},
    "drafts in trees, 1": {**TREES, "speculative_draft_attention_backend": "triton"},
    # The tests of this file can fail: what is broken on purpose is seen in the answers.
    "no appends while decoding": {**EAGER, "environment": {"SABOTAGE_OF_FI": "drop_appends"}},
    "triton": {"attention_backend": "triton"},
}
BROKEN, OTHER = "no appends while decoding", "triton"
OURS = [name for name in RUNS if name not in (BROKEN, OTHER)]
SPECULATIVE = [name for name in OURS if "drafts" in name]


def _shared() -> tuple[list[list[int]], list[list[int]]]:
    """Questions about one text, sent together."""
    text = copy_llama.text_without_repeats(2000, 99)
    pairs = [copy_llama.question(text, at, ANSWER) for at in (5, 1000, 2000 - ANSWER - 20)]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


@pytest.fixture(scope="module")
def results(
    copy_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Callable[[str], dict[str, Any]]:
    """Return the function (name of a run) -> its result; all chosen runs are over by then."""
    wanted = pytestconfig.getoption("--sglang-runs").split(";")
    limit = float(pytestconfig.getoption("--sglang-limit"))
    prompts, _ = copy_questions(CONTEXTS, ANSWER)
    batches = [prompts, prompts[-8:], _shared()[0], prompts[-1:]]
    found: dict[str, dict[str, Any]] = {}
    root = tmp_path_factory.mktemp("sglang")
    columns = ("steps", "attention_calls", "replayed_calls", "captured_calls", "kv_tokens_saved", "layers")
    print(f"\n{'run':<32}{'right':>6}{'start s':>8}{'run s':>7}" + "".join(f"{c:>17}" for c in columns))
    for index, name in enumerate(RUNS):
        if not any(text in name for text in wanted):
            continue
        model = str(copy_model(128))
        engine = {
            "model_path": model,
            "device": "cuda",
            "attention_backend": "fi",
            "dtype": "bfloat16",
            "context_length": 4096,
            "max_running_requests": CONCURRENT,
            "max_total_tokens": 262144,
            "chunked_prefill_size": CHUNK,
            "disable_cuda_graph": False,
            "cuda_graph_bs_decode": SIZES,
            **RUNS[name],
        }
        if "speculative_algorithm" in engine:
            engine["speculative_draft_model_path"] = model
        run = {
            "environment": engine.pop("environment", {}),
            "engine": engine,
            "batches": [{"prompts": p, "max_tokens": ANSWER, "logprobs": True} for p in batches],
        }
        try:
            result = run_engines(
                root / str(index), {name: run}, settings=SETTINGS, stubs=False, timeout=limit
            )[name]
        except EngineError as error:
            found[name] = {"error": str(error)}
            *lines, reason = str(error).splitlines()
            print(
                f"{name:<32}{reason[:150]}",
                *(f"    {line[:200]}" for line in lines[-40:]),
                sep="\n",
                flush=True,
            )
            continue
        found[name] = result
        right = sum(text == answer for text, answer in zip(*_texts(result), strict=True))
        print(
            f"{name:<32}{right:>6}{result['seconds']['start']:>8.1f}{result['seconds']['generate']:>7.1f}"
            + "".join(f"{getattr(result['stats'], column):>17}" for column in columns),
            flush=True,
        )
    return partial(_result_of, found)


def _result_of(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in found:
        pytest.skip("not chosen by --sglang-runs")
    if "error" in found[name]:
        pytest.fail(found[name]["error"][-6000:], pytrace=False)
    return found[name]


def _texts(result: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Return all answers that were given and all that are right."""
    _, answers = copy_questions(CONTEXTS, ANSWER)
    given = [tokens for batch in result["batches"] for tokens in batch["tokens"]]
    return given, [*answers, *answers[-8:], *_shared()[1], *answers[-1:]]


@pytest.mark.parametrize("name", OURS)
def test_every_answer_is_right(results: Any, name: str) -> None:
    given, right = _texts(results(name))
    wrong = [index for index, (text, answer) in enumerate(zip(given, right, strict=True)) if text != answer]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in OURS if name not in SPECULATIVE])
def test_fi_served_every_layer_of_every_step(results: Any, name: str) -> None:
    stats = results(name)["stats"]
    calls = stats.attention_calls + stats.replayed_calls + stats.captured_calls
    assert stats.layers == LAYERS
    if "graphs, " in name or "prefill" in name:
        # The capture of a broken prefill graph runs its attention three times for one planned step.
        assert calls >= LAYERS * stats.steps > 0
    else:
        assert calls == LAYERS * stats.steps > 0


@pytest.mark.parametrize("name", OURS)
def test_graphs_served_where_they_were_asked_for(results: Any, name: str) -> None:
    stats = results(name)["stats"]
    if "disable_cuda_graph" in RUNS[name] or "prefill alone" in name:
        assert (stats.captured_calls, stats.replayed_calls) == (0, 0)
    else:
        assert stats.captured_calls >= LAYERS * len(SIZES)
        # The last three batches, cached but for a few tokens, decode in so many steps, if one by one.
        least = LAYERS if name in SPECULATIVE else LAYERS * 3 * (ANSWER - 2)
        assert stats.replayed_calls >= least


@pytest.mark.parametrize("name", [name for name in OURS if "pool" not in name and "taken" not in name])
def test_prefixes_were_found_in_the_cache(results: Any, name: str) -> None:
    cached = results(name)["batches"][AGAIN]["cached"]
    assert all(tokens > 0.8 * context - 64 for tokens, context in zip(cached, CONTEXTS[-8:], strict=True))


@pytest.mark.parametrize("name", [name for name in OURS if "alone" not in name])
def test_a_shared_text_is_read_once_where_that_is_possible(results: Any, name: str) -> None:
    saved = results(name)["stats"].kv_tokens_saved
    assert (saved == 0) is (name in SPECULATIVE or "deterministic" in name)


@pytest.mark.parametrize("name", ["graphs, 16, small pool", "graphs, 16, taken back"])
def test_requests_were_taken_back(results: Any, name: str) -> None:
    result = results(name)
    retractions = sum(sum(batch["retractions"]) for batch in result["batches"])
    assert retractions or "etract" in result["log"]


def test_the_variant_ran(results: Any) -> None:
    assert results("graphs, 16, variant")["log"].count("attention layers run the variant output_scale") == 1


def test_a_deterministic_engine_gives_equal_bits_in_any_batch(results: Any) -> None:
    batches = results("graphs, 16, deterministic")["batches"]
    assert batches[ALONE]["logprobs"][-1] == batches[MIXED]["logprobs"][-1] == batches[AGAIN]["logprobs"][-1]


@pytest.mark.parametrize("name", SPECULATIVE)
def test_drafts_were_accepted(results: Any, name: str) -> None:
    """The draft model is the model: a verification yields several tokens."""
    for batch in results(name)["batches"]:
        verified = sum(batch["verifications"])
        assert 0 < verified < 0.5 * ANSWER * len(batch["tokens"])


def test_a_broken_back_end_changes_the_answers(results: Any) -> None:
    """In the last batches at least, whose requests decode in steps of their own."""
    given = results(BROKEN)["batches"][SHARED]["tokens"]
    assert all(text != answer for text, answer in zip(given, _shared()[1], strict=True))


def test_another_back_end_is_not_counted(results: Any) -> None:
    given, right = _texts(results(OTHER))
    assert given == right
    assert results(OTHER)["stats"].layers == 0
