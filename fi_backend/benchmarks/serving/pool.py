# SPDX-License-Identifier: Apache-2.0
"""Rows made anew from the raw requests of several records: the same back end and rate, other seeds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome, Request
from fi_backend.benchmarks.serving.records import REQUESTS
from fi_backend.benchmarks.serving.summary import Measured, Objective, client_late, summarize

Key = tuple[str, float]
"""Back end and rate."""


@dataclass(frozen=True)
class Part:
    """A row of one record, and its requests: lines of requests.jsonl in any order."""

    row: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]


def read_requests(folder: Path, wanted: Collection[Key]) -> dict[Key, list[dict[str, Any]]]:
    """Return the lines of requests.jsonl in `folder` by back end and rate, of the wanted ones.

    A last line that was not written to its end, as of a run that was killed, is left out. Raises ValueError
    naming file and line.
    """
    path = folder / REQUESTS
    found: dict[Key, list[dict[str, Any]]] = {key: [] for key in wanted}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    each = json.loads(line)
                    if (key := (each["backend"], each["rate"])) in found:
                        found[key].append(each)
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f"{path}, line {number}: expected a request; {error!r}.") from None
    except OSError as error:
        raise ValueError(
            f"{path}: expected the requests of the record beside it, to pool them; {error.strerror}."
        ) from None
    return found


def pool(rate: float, parts: Sequence[Part], objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return the row of all requests of `parts`, with bounds of its own; see summarize().

    Counters and KV bytes are sums. The lags of the client's loop, of which records have percentiles only, are
    the largest; the balance is that of the first part. Raises ValueError where requests are missing.
    """
    row = summarize(rate, [run for part in parts for run in _runs(part)], objectives)
    rows = [part.row for part in parts]
    loops = [each["loop_lag_ms"] for each in rows if each.get("loop_lag_ms")]
    row["loop_lag_ms"] = {name: max(each[name] for each in loops) for name in loops[0]} if loops else None
    row["client_late"] = client_late(row, objectives)
    row["fi"] = _sum([each["fi"] for each in rows])
    kv_bytes = [each["kv_bytes"] for each in rows]
    row["kv_bytes"] = {
        name: None if any(each[name] is None for each in kv_bytes) else sum(each[name] for each in kv_bytes)
        for name in ("flat", "saved")
    }
    return row | next(({"balance": each["balance"]} for each in rows if each.get("balance")), {})


def _sum(counts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    known = [each for each in counts if each is not None]
    if len(known) < len(counts):
        return None
    # Records of other versions may count more or less.
    return {
        name: sum(each[name] for each in known) for name in known[0] if all(name in each for each in known)
    }


def _runs(part: Part) -> list[Measured]:
    """The runs as they were measured, but for the tokens; seconds are those of all runs in equal parts."""
    if len(part.lines) != part.row["requests"]:
        raise ValueError(f"expected {part.row['requests']} requests; {REQUESTS} has {len(part.lines)}.")
    runs: dict[int, list[Mapping[str, Any]]] = {}
    try:
        for line in sorted(part.lines, key=lambda each: (each["run"], each["index"])):
            runs.setdefault(line["run"], []).append(line)
        seconds, stopped = part.row["seconds"] / max(len(runs), 1), part.row["stopped_early"]
        return [
            Measured(
                [_request(line) for line in lines],
                LoadRun([_outcome(line) for line in lines], seconds, stopped=stopped),
            )
            for lines in runs.values()
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected requests as this version writes them in {REQUESTS}; {error!r}.") from None


def _request(line: Mapping[str, Any]) -> Request:
    return Request([0] * line["prompt_tokens"], line["answer_tokens"], line["at_s"], line["samples"])


def _outcome(line: Mapping[str, Any]) -> Outcome:
    if line["stopped"] and "stopped_ms" not in line:
        raise ValueError(f"expected stopped_ms in {REQUESTS}, which older versions did not write.")
    outcome = Outcome(line["samples"], error=line["error"], count=line["received_tokens"])
    outcome.sent = None if line["lag_ms"] is None else line["lag_ms"] / 1000
    outcome.times = [[at / 1000 for at in times] for times in line["piece_ms"]]
    if line["stopped"]:
        outcome.stopped = line["stopped_ms"] / 1000
    elif line["error"] is None:
        outcome.ended = line["samples"]
    return outcome
