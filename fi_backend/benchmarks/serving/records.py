# SPDX-License-Identifier: Apache-2.0
"""The files of a serving benchmark: one record, and one line for each request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fi_backend.benchmarks.serving.record_shape import misshapen
from fi_backend.benchmarks.serving.summary import Measured

FORMAT: Final = "fi_backend serving 1"
RECORD, REQUESTS = "record.json", "requests.jsonl"


def request_lines(backend: str, rate: float, run: Measured, *, number: int) -> Iterator[str]:
    """Yield one JSON object a request of the run `number` of a rate.

    Times are milliseconds after the request was due, rounded to a microsecond.
    """
    pairs = zip(run.requests, run.load.outcomes, strict=True)
    for index, (request, outcome) in enumerate(pairs):
        row = {
            "backend": backend,
            "rate": rate,
            "run": number,
            "index": index,
            "at_s": round(request.at, 6),
            "lag_ms": None if outcome.sent is None else round(1000 * outcome.sent, 3),
            "prompt_tokens": len(request.prompt),
            "answer_tokens": request.max_tokens,
            "samples": request.samples,
            "received_tokens": outcome.count,
            "piece_ms": [[round(1000 * at, 3) for at in times] for times in outcome.times],
            "error": outcome.error,
            "stopped": outcome.stopped is not None,
            "stopped_ms": None if outcome.stopped is None else round(1000 * outcome.stopped, 3),
        }
        yield json.dumps(row, separators=(",", ":"))


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write RECORD into `folder`; a reader sees the old or the new one, never half of it."""
    write_whole(folder / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that a reader never sees half of, nor one who comes after a kill."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


def read_record(path: Path) -> dict[str, Any]:
    """Return the record in a file, or in the folder that holds it; ValueError naming file and field."""
    path = path / RECORD if path.is_dir() else path
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: expected a serving record; {error.strerror}.") from None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON; {error}.") from None
    check_record(record, str(path))
    return dict(record)


def check_record(record: Any, name: str) -> None:
    """Raise ValueError, naming the field, unless `record` is what this version writes."""
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        got = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{name}: format: expected {FORMAT!r}; got {got!r}.")
    if problem := misshapen(record):
        raise ValueError(f"{name}: {problem}. Measure again with this version, or report it with its own.")
