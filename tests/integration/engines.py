# SPDX-License-Identifier: Apache-2.0
"""What the engine tests ask and how they judge a run; the fixtures that start engines are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from models import copy_llama, random_models

Engine = Callable[..., list[dict[str, Any]]]


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


def result_of(found: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the result of a run, or skip when it was not chosen, or fail with what stopped it."""
    if name not in found:
        pytest.skip("not chosen by --vllm-runs")
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
