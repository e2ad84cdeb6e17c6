# SPDX-License-Identifier: Apache-2.0
"""copy-llama through vLLM on a GPU: the known answers, eager and from CUDA graphs of every kind.

Small enough for every configuration to start in seconds: vLLM compiles nothing (mode 0), or only splits the
model at its attention layers (the compile back end "eager"), as FULL_AND_PIECEWISE needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, copy_questions, result_of, tree_questions

from models import copy_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = 2
ANSWER = 24
CONCURRENT = 64
# 64 requests of mixed length; those beyond a step's budget of tokens are prefilled in chunks.
CONTEXTS = [40 + (index * 389) % 2900 for index in range(CONCURRENT)]
SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
FULL = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": SIZES}
DECODE = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
PIECEWISE = {
    "mode": 3,
    "backend": "eager",
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": SIZES,
}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
# So long that a model of two KV heads gains by sharing: a text of all, and one of each of eight groups.
ALL, GROUP, GROUPS = 5120, 1024, 8
# Tokens of a pool that holds the prompts, but not what is generated.
TREE_POOL = ALL + GROUPS * GROUP + CONCURRENT * 48 + 512


def _outputs_times(factor: float) -> dict[str, Any]:
    """A shipped variant of attention, asked for by its name; copy-llama has four heads."""
    return {"fi_backend": {"variant": "output_scale", "variant_args": {"scale": [factor] * 4}}}


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 3}

# Requests behind a text of all and a text of their group.
OFF = {"FI_BACKEND_WITHOUT": "sharing"}
SHARING: dict[str, dict[str, Any]] = {
    "shared, eager, 16": {"block_size": 16, "enforce_eager": True, "environment": {"FI_BACKEND_DEBUG": "1"}},
    "shared, FULL, 16": {"block_size": 16, "compilation_config": FULL, "sabotage": "no_sync"},
    "shared, FULL, 64": {"block_size": 64, "compilation_config": FULL, "sabotage": "check_faults"},
    "shared, FULL_AND_PIECEWISE, 16": {"block_size": 16, "compilation_config": PIECEWISE},
    "shared, V1 runner, eager, 16": {"block_size": 16, "enforce_eager": True, "environment": V1},
    "shared, V1 runner, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "environment": V1,
        "sabotage": "no_sync",
    },
    "shared, preemption, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "kv_cache_memory_bytes": TREE_POOL * 2 * 2 * 128 * 2 * LAYERS,
    },
    "shared, without lpt, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "environment": {"FI_BACKEND_WITHOUT": "lpt"},
    },
    "shared, without device_plan, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "environment": {"FI_BACKEND_WITHOUT": "device_plan"},
    },
    "flat, FULL, 16": {"block_size": 16, "compilation_config": FULL, "environment": OFF},
    "flat, V1 runner, eager, 16": {"block_size": 16, "enforce_eager": True, "environment": {**V1, **OFF}},
}

# sabotage: a name of engine_patches.SABOTAGE; environment: variables; the rest: arguments of vllm.LLM.
RUNS: dict[str, dict[str, Any]] = {
    "eager, 16": {"block_size": 16, "enforce_eager": True, "environment": {"FI_BACKEND_DEBUG": "1"}},
    "eager, 64": {"block_size": 64, "enforce_eager": True, "sabotage": "no_sync"},
    "FULL, 16": {"block_size": 16, "compilation_config": FULL, "sabotage": "check_faults"},
    "FULL, 64": {"block_size": 64, "compilation_config": FULL, "sabotage": "no_sync"},
    "FULL_DECODE_ONLY, 16": {"block_size": 16, "compilation_config": DECODE},
    "FULL_AND_PIECEWISE, 16": {"block_size": 16, "compilation_config": PIECEWISE},
    "FULL_AND_PIECEWISE, 64": {
        "block_size": 64,
        "compilation_config": PIECEWISE,
        "sabotage": "no_sync",
    },
    "V1 runner, eager, 16": {"block_size": 16, "enforce_eager": True, "environment": V1},
    "V1 runner, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "environment": V1,
        "sabotage": "no_sync",
    },
    "V1 runner, FULL_AND_PIECEWISE, 64": {
        "block_size": 64,
        "compilation_config": PIECEWISE,
        "environment": V1,
    },
    "float16, FULL, 32": {"block_size": 32, "compilation_config": FULL, "dtype": "float16"},
    "256-wide heads, FULL, 16": {"block_size": 16, "compilation_config": FULL, "head_dim": 256},
    "HND layout, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "environment": {"VLLM_KV_CACHE_LAYOUT": "HND"},
    },
    "preemption, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "kv_cache_memory_bytes": 8192 * 2 * 2 * 128 * 2 * LAYERS,
    },
    "variant, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "additional_config": _outputs_times(1.0),
    },
    # The tests of this file can fail: what is broken on purpose is seen in the answers.
    "variant that silences": {
        "block_size": 16,
        "compilation_config": FULL,
        "additional_config": _outputs_times(0.0),
    },
    "lengths one page short": {
        "block_size": 16,
        "enforce_eager": True,
        "sabotage": "ignore_last_page",
    },
    "no appends while decoding": {"block_size": 16, "enforce_eager": True, "sabotage": "drop_appends"},
    "FLASH_ATTN": {"block_size": 16, "compilation_config": FULL, "attention_backend": "FLASH_ATTN"},
    **SHARING,
    # Last: it loads numba, after which vLLM starts no second engine in a process.
    "speculation, FULL, 16": {
        "block_size": 16,
        "compilation_config": FULL,
        "speculative_config": NGRAM,
    },
}
BROKEN = ("variant that silences", "lengths one page short", "no appends while decoding")
OURS = [name for name in RUNS if name not in (*BROKEN, "FLASH_ATTN")]
# The questions of those that run the first three batches.
SINGLE = [name for name in OURS if name not in SHARING]
MIXED, AGAIN, SHARED = range(3)


def _shared() -> tuple[list[list[int]], list[list[int]]]:
    """Questions about one text, sent together: rows read blocks that another row of the step writes."""
    text = copy_llama.text_without_repeats(2000, 99)
    pairs = [copy_llama.question(text, at, ANSWER) for at in (5, 1000, 2000 - ANSWER - 20)]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def _batches(name: str) -> list[tuple[list[list[int]], list[list[int]]]]:
    """Prompts and answers of each batch of a run."""
    if name in SHARING:
        tree = tree_questions(((1, ALL), (GROUPS, GROUP)), CONCURRENT, 40, ANSWER)
        return [tree, tree]  # computed, then found in the cache
    prompts, answers = copy_questions(CONTEXTS, ANSWER)
    return [(prompts, answers), (prompts[-8:], answers[-8:]), _shared()]


@pytest.fixture(scope="module")
def results(
    engine: Engine, copy_model: Callable[..., Path], chosen_runs: Callable[..., list[str]], pytestconfig: Any
) -> Callable[[str], dict[str, Any]]:
    """Return the function (name of a run) -> its result; all chosen runs are over by then."""
    names = chosen_runs(RUNS)
    runs = []
    for name in names:
        llm = {
            "attention_backend": "FI",
            "dtype": "bfloat16",
            "max_model_len": 8192 if name in SHARING else 4096,
            "max_num_seqs": CONCURRENT,
            "max_num_batched_tokens": 1024,
            "kv_cache_memory_bytes": 2**29,
            "enforce_eager": False,
            **RUNS[name],
        }
        run = {key: llm.pop(key) for key in ("sabotage", "environment") if key in llm}
        llm["model"] = str(copy_model(llm.pop("head_dim", 128)))
        batches = [{"prompts": prompts, "max_tokens": ANSWER} for prompts, _ in _batches(name)]
        runs.append({**run, "name": name, "llm": llm, "batches": batches})
    limit = pytestconfig.getoption("--vllm-limit")
    made = engine(*runs, keep_going=True, seconds=limit, timeout=1200) if runs else []
    found = dict(zip(names, made, strict=True))
    print(_table(found))
    return partial(result_of, found)


def _table(found: dict[str, dict[str, Any]]) -> str:
    """Return one line a run, for whoever reads the output of a machine that is gone by then."""
    columns = ("steps", "attention_calls", "replayed_calls", "captured_calls", "shared_plans")
    lines = [f"\n{'run':<36}{'right':>6}{'start s':>8}{'run s':>7}" + "".join(f"{c:>17}" for c in columns)]
    for name, result in found.items():
        if stopped := result.get("error") or result.get("skipped"):
            lines.append(f"{name:<36}{stopped.splitlines()[-1][:150]}")
            continue
        right = sum(text == answer for text, answer in zip(*_texts(name, result), strict=True))
        seconds = result["seconds"]
        lines.append(
            f"{name:<36}{right:>6}{seconds['start']:>8.1f}{seconds['generate']:>7.1f}"
            + "".join(f"{result['stats'][column]:>17}" for column in columns)
        )
    return "\n".join(lines)


def _texts(name: str, result: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Return all answers that were given and all that are right."""
    given = [tokens for batch in result["batches"] for tokens in batch["tokens"]]
    return given, [answer for _, answers in _batches(name) for answer in answers]


@pytest.mark.parametrize("name", OURS)
def test_every_answer_is_right(results: Any, name: str) -> None:
    given, right = _texts(name, results(name))
    wrong = [index for index, (text, answer) in enumerate(zip(given, right, strict=True)) if text != answer]
    assert not wrong


@pytest.mark.parametrize("name", OURS)
def test_fi_served_every_layer_of_every_step(results: Any, name: str) -> None:
    stats = results(name)["stats"]
    calls = stats["attention_calls"] + stats["replayed_calls"] + stats["captured_calls"]
    assert stats["layers"] == LAYERS
    assert calls == LAYERS * stats["steps"] > 0


@pytest.mark.parametrize("name", OURS)
def test_graphs_served_where_they_were_asked_for(results: Any, name: str) -> None:
    stats = results(name)["stats"]
    if RUNS[name].get("enforce_eager"):
        assert (stats["captured_calls"], stats["replayed_calls"]) == (0, 0)
    else:
        assert stats["captured_calls"] > 0
        # Two batches, cached but for a few tokens, decode in so many steps, if one by one.
        least = 1 if "speculation" in name else LAYERS * 2 * (ANSWER - 2)
        assert stats["replayed_calls"] >= least


@pytest.mark.parametrize("name", [name for name in SINGLE if "preemption" not in name])
def test_prefixes_were_found_in_the_cache(results: Any, name: str) -> None:
    cached = results(name)["batches"][AGAIN]["cached"]
    assert all(tokens > 0.8 * context - 64 for tokens, context in zip(cached, CONTEXTS[-8:], strict=True))


@pytest.mark.parametrize("name", [name for name in OURS if "preemption" in name])
def test_requests_were_preempted(results: Any, name: str) -> None:
    assert results(name)["metrics"]["num_preemptions"] > 0


@pytest.mark.parametrize("name", SHARING)
def test_prefixes_were_read_once(results: Any, name: str) -> None:
    stats = results(name)["stats"]
    if "flat" in name:
        assert stats["shared_plans"] == stats["kv_tokens_saved"] == 0
        return
    # What a GPU has counted is known up to 32 plans later; each batch decodes in some 24 steps.
    assert stats["shared_plans"] >= ANSWER / 2
    assert stats["prefix_nodes"] > 2 * stats["shared_plans"]
    assert stats["kv_bytes_saved"] == stats["kv_tokens_saved"] * 2 * 2 * 128 * 2 * LAYERS
    if "preemption" not in name:
        all_decoding = (CONCURRENT - 1) * ALL + (CONCURRENT - GROUPS) * GROUP
        assert stats["kv_tokens_saved"] > 0.4 * all_decoding * stats["shared_plans"]


def test_speculation_was_accepted(results: Any) -> None:
    assert results("speculation, FULL, 16")["metrics"]["spec_decode_num_accepted_tokens"] > CONCURRENT


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_back_end_changes_the_answers(results: Any, name: str) -> None:
    """In the last batch at least, whose requests decode in steps of their own."""
    _, right = _shared()
    given = results(name)["batches"][SHARED]["tokens"]
    assert all(text != answer for text, answer in zip(given, right, strict=True))


def test_another_back_end_is_not_counted(results: Any) -> None:
    given, right = _texts("FLASH_ATTN", results("FLASH_ATTN"))
    assert given == right
    assert results("FLASH_ATTN")["stats"]["layers"] == 0
