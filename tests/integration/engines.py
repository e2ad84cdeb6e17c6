# SPDX-License-Identifier: Apache-2.0
"""What the engine tests ask and how they judge a run; the fixtures that start engines are in conftest.py."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from models import copy_llama, random_models

Engine = Callable[..., list[dict[str, Any]]]


def stream(command: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float) -> int:
    """Run a command with its output in `log`, and print what engine_run.py says while it runs.

    Returns the exit status; that of SIGKILL, which all of its processes get, after `timeout` seconds.
    """
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        end = threading.Timer(timeout, os.killpg, (child.pid, signal.SIGKILL))
        end.start()
        try:
            for line in child.stdout:
                file.write(line)
                if line.startswith(b"engine_run:"):
                    print(line.decode(errors="replace"), end="", flush=True)
        finally:
            end.cancel()
    return child.returncode


def one_core_each(workers: int) -> str:
    """Return vLLM's way to bind its workers to cores, of those that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[worker % len(cores)]) for worker in range(workers))


def copy_questions(
    contexts: Sequence[int], answer_length: int, *, seed: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts of about `contexts` tokens for copy-llama, and their known answers."""
    pairs = []
    for index, context in enumerate(contexts):
        text = copy_llama.text_without_repeats(context - 8, seed * 1000 + index)
        at = (len(text) - answer_length - 6) * (index + 1) // (len(contexts) + 1)
        pairs.append(copy_llama.question(text, at, answer_length))
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def tree_questions(
    branches: Sequence[tuple[int, int]], requests: int, own: int, answer_length: int, *, seed: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts for copy-llama that share their beginnings, and their known answers.

    branches: for each level of the tree (children of each node, tokens of each); the requests lie below the
    leaves in turn and have `own` tokens of theirs. What is asked for lies anywhere in a request's text.
    """
    texts = [b""]
    for level, (children, tokens) in enumerate(branches):
        # The children of a node follow each other with a stride, so that neighbours part at the last level.
        texts = [
            copy_llama.text_without_repeats(
                len(text) + tokens, seed + 1000 * level + child * len(texts) + i, after=text
            )
            for child in range(children)
            for i, text in enumerate(texts)
        ]
    pairs = []
    for request in range(requests):
        text = texts[request % len(texts)]
        text = copy_llama.text_without_repeats(len(text) + own, seed + 10**6 + request, after=text)
        at = (len(text) - answer_length - 6) * (request + 1) // (requests + 1)
        pairs.append(copy_llama.question(text, at, answer_length))
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def result_of(found: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the result of a run, or skip when it was not made, or fail with what stopped it."""
    if name not in found:
        pytest.skip("not chosen by --vllm-runs")
    if "skipped" in found[name]:
        pytest.skip(found[name]["skipped"])
    if "error" in found[name]:
        pytest.fail(found[name]["error"], pytrace=False)
    return found[name]


def feature_prompts() -> list[list[int]]:
    """Short, longer than the sliding windows, and longer than a step's budget of tokens."""
    lengths = (1, 7, random_models.WINDOW - 3, random_models.WINDOW + 3, 150, 500)
    return [list(copy_llama.text_without_repeats(max(length, 2), length))[:length] for length in lengths]


def prompt_logprobs(result: Mapping[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of all prompt tokens of the first batch."""
    return torch.tensor([value for prompt in result["batches"][0]["prompt_logprobs"] for value in prompt])


def assert_served(result: Mapping[str, Any], layers: int) -> None:
    """Assert that the fi back end computed every attention of the run: calls = layers x steps."""
    stats = result["stats"]
    assert stats["layers"] == layers
    assert stats["attention_calls"] == layers * stats["steps"] > 0
