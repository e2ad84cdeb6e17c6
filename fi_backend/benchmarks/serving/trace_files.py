# SPDX-License-Identifier: Apache-2.0
"""Reads recorded traces: JSON lines of arrival times, lengths and, in some, ids of prefix blocks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.serving.arrivals import Arrival

BLOCK_TOKENS = 512
# Our own short names, and those of the Mooncake traces.
_TIME = ("t_ms", "timestamp")
_PROMPT = ("in", "input_length")
_ANSWER = ("out", "output_length")


def read_trace(path: Path, *, max_len: int | None = None) -> list[Arrival]:
    """Return the requests of a trace in arrival order, the first at second 0.

    path: one JSON object a line with t_ms, in, out (or timestamp, input_length, output_length) and perhaps
    prefix blocks of 512 tokens, as hash_ids or run-length coded as runs [[first id, count], ...];
    compressed when the name ends in .gz. max_len: longer requests, prompt and answer, are left out.
    Raises ValueError naming file and line, also when no request remains.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    found = []
    with opener(path, "rt") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    found.append(_arrival(json.loads(line)))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    kept = sorted(
        (each for each in found if max_len is None or each.prompt + each.answer <= max_len),
        key=lambda each: each.at,
    )
    if not kept:
        limit = "" if max_len is None else f" of at most {max_len} tokens"
        raise ValueError(f"{path}: expected requests{limit}; got none among {len(found)}.")
    return [
        Arrival(each.at - kept[0].at, each.prompt, each.answer, each.prefix, each.samples) for each in kept
    ]


def _arrival(row: Mapping[str, Any]) -> Arrival:
    prompt, answer = int(_field(row, _PROMPT)), int(_field(row, _ANSWER))
    if prompt < 1 or answer < 0:
        raise ValueError(f"expected in >= 1 and out >= 0; got {prompt} and {answer}")
    ids = row.get("hash_ids")
    if ids is None:
        ids = [first + step for first, count in row.get("runs", ()) for step in range(count)]
    # An engine generates at least one token for every request.
    prefix = tuple((int(each), BLOCK_TOKENS) for each in ids)
    return Arrival(float(_field(row, _TIME)) / 1000, prompt, max(answer, 1), prefix)


def _field(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise ValueError(f"expected a field {' or '.join(names)}; got {', '.join(row) or 'none'}")
