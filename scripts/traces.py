# SPDX-License-Identifier: Apache-2.0
"""Arrival times and lengths of recorded requests."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

AZURE_CONVERSATION = Path(__file__).parents[1] / "benchmarks" / "serving" / "azure2023-conv-90s.jsonl"


@dataclass(frozen=True)
class Arrival:
    """at: seconds after the first request. prompt, answer: tokens."""

    at: float
    prompt: int
    answer: int


def read(path: Path, *, seconds: float, speed: float = 1.0) -> list[Arrival]:
    """Return the arrivals of the first `seconds` of the trace, replayed `speed` times as fast.

    path: JSON lines with t_ms, in and out; compressed when the name ends in .gz. Raises ValueError when
    the trace is shorter.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        rows = [json.loads(line) for line in file]
    if rows[-1]["t_ms"] < 1000 * (seconds - 5):
        raise ValueError(f"{path}: expected {seconds} s of requests; got {rows[-1]['t_ms'] / 1000} s.")
    return [
        Arrival(row["t_ms"] / 1000 / speed, row["in"], row["out"])
        for row in rows
        if row["t_ms"] < 1000 * seconds
    ]
