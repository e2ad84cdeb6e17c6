# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes through vLLM on the CPU: the same tokens, and as few KV rows read as the tree says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, assert_served, tree_questions

pytestmark = pytest.mark.engine

LAYERS = {"copy": 2, "llama": 3}
BYTES_A_TOKEN = 2 * 2 * 64 * 2 * 2  # of copy-llama: K and V, 2 heads, bfloat16, 2 layers
REQUESTS, BLOCK, ANSWER = 16, 16, 24
TREES = {
    "two levels": ((1, 640), (4, 160)),
    "three levels": ((1, 320), (4, 224), (2, 192)),
}
# Prompts fit into it together, but not what is generated.
SMALL_POOL = 2304
OFF = {"FI_BACKEND_WITHOUT": "sharing"}
SHARED, FLAT, THEIRS, PREEMPTED = "shared", "flat", "CPU_ATTN", "small pool"
SABOTAGES = ("equal_by_their_first_page", "wrong_representative")
RUNS: dict[str, dict[str, Any]] = {
    SHARED: {"sabotage": "record_reads"},
    FLAT: {"sabotage": "record_reads", "environment": OFF},
    THEIRS: {"attention_backend": "CPU_ATTN", "block_size": 32},
    PREEMPTED: {"kv_cache_memory_bytes": SMALL_POOL * BYTES_A_TOKEN},
    **{name: {"sabotage": name} for name in SABOTAGES},
}
RANDOM = {f"random {name}": changes for name, changes in RUNS.items() if name in (SHARED, FLAT, THEIRS)}
SAMPLES = 3


def _questions(tree: str) -> tuple[list[list[int]], list[list[int]]]:
    return tree_questions(TREES[tree], REQUESTS, 40, ANSWER)


@pytest.fixture(scope="module")
def results(
    engine: Engine, copy_model: Callable[..., Path], random_model: Callable[[str], Path]
) -> dict[str, dict[str, Any]]:
    """Results by name of RUNS and RANDOM; the batches are those of TREES, then samples of four prompts."""
    batches = [{"prompts": _questions(tree)[0], "max_tokens": ANSWER} for tree in TREES]
    # So cold that copy-llama cannot but give its answer.
    cold = {"n": SAMPLES, "temperature": 0.1}
    samples = {"prompts": _questions("two levels")[0][:4], "max_tokens": ANSWER, "sampling": cold}
    runs = []
    for name, changes in {**RUNS, **RANDOM}.items():
        is_random = name in RANDOM
        llm = {
            "model": str(random_model("llama") if is_random else copy_model(64)),
            "attention_backend": "fi",
            "dtype": "float32" if is_random else "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": REQUESTS,
            # Prompts are prefilled in chunks, beside requests that decode already.
            "max_num_batched_tokens": 384,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 2**25,
            **changes,
        }
        run = {key: llm.pop(key) for key in ("sabotage", "environment") if key in llm}
        runs.append(
            {**run, "name": name, "llm": llm, "batches": batches if is_random else [*batches, samples]}
        )
    return dict(zip([*RUNS, *RANDOM], engine(*runs), strict=True))


def _texts(result: dict[str, Any]) -> list[list[list[int]]]:
    return [batch["tokens"] for batch in result["batches"]]


def _answers() -> list[list[list[int]]]:
    """Of copy-llama, by batch."""
    samples = [answer for answer in _questions("two levels")[1][:4] for _ in range(SAMPLES)]
    return [*(_questions(tree)[1] for tree in TREES), samples]


@pytest.mark.parametrize("name", [SHARED, FLAT, THEIRS, PREEMPTED])
def test_answers_are_right(results: Any, name: str) -> None:
    assert _texts(results[name]) == _answers()


@pytest.mark.parametrize("name", [SHARED, FLAT])
def test_a_random_model_says_the_same(results: Any, name: str) -> None:
    assert _texts(results[f"random {name}"]) == _texts(results[f"random {THEIRS}"])
    assert_served(results[f"random {name}"], LAYERS["llama"])


@pytest.mark.parametrize("prefix", ["", "random "])
def test_as_few_rows_are_read_as_the_tree_says(results: Any, prefix: str) -> None:
    shared, flat = (results[prefix + name] for name in (SHARED, FLAT))
    assert [each["nodes"] for each in flat["records"]] == [0] * len(flat["records"])
    decoding = 0
    for with_sharing, without in zip(shared["records"], flat["records"], strict=True):
        assert with_sharing["tokens"] == without["tokens"]
        saved = without["read"] - with_sharing["read"]
        assert 0 <= saved <= with_sharing["tree"]
        if with_sharing["tokens"] == with_sharing["requests"] == REQUESTS:
            decoding += 1
            assert saved == with_sharing["tree"] > 0.7 * without["read"]
    assert decoding > ANSWER
    total = {key: sum(each[key] for each in shared["records"]) for key in ("read", "tree", "nodes")}
    saved = sum(each["read"] for each in flat["records"]) - total["read"]
    assert 0.9 * total["tree"] < saved <= total["tree"]

    stats = shared["stats"]
    assert (stats["kv_tokens_saved"], stats["prefix_nodes"]) == (saved, total["nodes"])
    assert stats["shared_plans"] == sum(each["nodes"] > 0 for each in shared["records"])
    assert flat["stats"]["shared_plans"] == flat["stats"]["kv_bytes_saved"] == 0


def test_bytes_are_those_of_all_heads_and_layers(results: Any) -> None:
    stats = results[SHARED]["stats"]
    assert stats["kv_bytes_saved"] == stats["kv_tokens_saved"] * BYTES_A_TOKEN > 0


def test_three_levels_are_kept(results: Any) -> None:
    """A text of all, four, and eight below these, in a step in which all requests decode."""
    assert max(each["nodes"] for each in results[SHARED]["records"]) == 1 + 4 + 8


def test_steps_were_mixed(results: Any) -> None:
    """Requests were prefilled in steps in which others shared."""
    assert any(each["tokens"] > 2 * each["requests"] and each["nodes"] for each in results[SHARED]["records"])


def test_samples_of_one_prompt_share_it(results: Any) -> None:
    """In the last steps, three samples of each of four prompts decode."""
    last = results[SHARED]["records"][-ANSWER // 2]
    assert last["requests"] == 4 * SAMPLES
    assert last["nodes"] == 1 + 4


def test_requests_were_preempted_and_shared(results: Any) -> None:
    assert results[PREEMPTED]["metrics"]["num_preemptions"] > 0, "the pool was not small enough to preempt"
    assert results[PREEMPTED]["stats"]["shared_plans"] > 0


def test_it_is_said_once(results: Any) -> None:
    log = results[SHARED]["log"]
    assert log.count("requests share prefixes, which are read once") == 1


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_broken_sharing_changes_answers(results: Any, sabotage: str) -> None:
    """Of most requests at least: some are asked for what lies in a text of all."""
    for given, right in zip(_texts(results[sabotage])[:2], _answers()[:2], strict=True):
        assert sum(text != answer for text, answer in zip(given, right, strict=True)) >= 3
