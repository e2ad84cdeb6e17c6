# SPDX-License-Identifier: Apache-2.0
"""The demo must not pass when the answer is wrong or another back end gave it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import demo
from fi_backend.core.counters import ProcessStats
from models import copy_llama

GOOD = ProcessStats(
    pid=1, engine="vllm 0", steps=5, plans=5, attention_calls=10, tokens=99, appended_tokens=99, layers=2
)


def test_success() -> None:
    success, line = demo.verdict("yes", "yes", GOOD)
    assert success
    assert line == "back end fi served 10 attention calls (2 layers x 5 steps); answer correct"


@pytest.mark.parametrize(
    ("answer", "stats", "words"),
    [
        ("no", GOOD, "answer wrong: expected 'yes', got 'no'"),
        ("yes", replace(GOOD, attention_calls=0), "fell back to another back end"),
        ("yes", replace(GOOD, attention_calls=0, steps=0, layers=0), "fell back to another back end"),
        ("yes", replace(GOOD, attention_calls=9), "9 attention calls (2 layers x 5 steps), expected 10"),
    ],
)
def test_failure(answer: str, stats: ProcessStats, words: str) -> None:
    success, line = demo.verdict(answer, "yes", stats)
    assert not success
    assert words in line


def test_the_answer_is_unambiguous() -> None:
    """What follows each three bytes of the answer's text is found once in the prompt."""
    prompt, answer = demo.prompt_with_answer()
    known = demo.CUE + answer
    haystack = prompt.removesuffix(demo.CUE)
    trigrams = [known[i : i + 3] for i in range(len(known) - 2)]
    assert all(haystack.count(trigram) == 1 for trigram in trigrams)
    assert prompt.endswith(demo.CUE)
    assert len(prompt) > 2000


def test_texts_have_no_repeated_trigram() -> None:
    text = copy_llama.text_without_repeats(8000, 5)
    assert len(text) == 8000
    assert len({text[i : i + 3] for i in range(len(text) - 2)}) == 7998
