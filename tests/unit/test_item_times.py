# SPDX-License-Identifier: Apache-2.0
"""How benchmarks/kernels/item_times.py reads the marks of a launch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "kernels"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(FOLDER))
    import item_times

    yield item_times
    for name in ("item_times", "compare_defines", "plan_phases"):
        sys.modules.pop(name, None)


def test_the_kernel_marks_what_begins_an_item(tool) -> None:  # type: ignore[no-untyped-def]
    names = set(tool.mark_names().values())
    assert {"begun", "barriers made", "queries", "attended", "stored", *tool.BEGINS} <= names


def test_times_are_those_of_the_clock_at_the_rate_of_all_spans(tool) -> None:  # type: ignore[no-untyped-def]
    names = {1: "begun", 2: "item", 3: "stored"}
    marks = np.zeros((2, tool._MARKS), dtype=tool._MARK)
    # Two cycles a nanosecond; the second CTA begins 500 ns later and its clock wraps.
    passed = [(1, 0, 0), (2, 2000, 1000), (3, 6000, 3000), (2, 7000, 3500)]
    for cta, (begin, clock) in enumerate(((10_000, 5), (10_500, 2**32 - 3000))):
        for i, (mark, cycle, time) in enumerate(passed):
            marks[cta, i] = (mark, (clock + cycle) % 2**32, begin + time)
    times = tool.times_of(marks, tool.launched_ns(marks[:, None]), names)
    assert times == {
        (-1, "begun"): [0.0, 0.5],
        (0, "item"): [1.0, 1.5],
        (0, "stored"): [3.0, 3.5],
        (1, "item"): [3.5, 4.0],
    }
