# SPDX-License-Identifier: Apache-2.0
"""What the engine tests ask and how they judge a run; the fixtures that start engines are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from models import copy_llama

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


def assert_served(result: Mapping[str, Any], layers: int) -> None:
    """Assert that the fi back end computed every attention of the run: calls = layers x steps."""
    stats = result["stats"]
    assert stats["layers"] == layers
    assert stats["attention_calls"] == layers * stats["steps"] > 0
