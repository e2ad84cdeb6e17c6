# SPDX-License-Identifier: Apache-2.0
"""What the requests of one rate come to: percentiles with bounds, goodput, our own lag, KV bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from fi_backend.benchmarks.serving.bounds import percentile_bounds
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome, Request

PERCENTS = (50, 90, 99)
METRICS = ("ttft_ms", "itl_ms", "e2e_ms")


@dataclass(frozen=True)
class Objective:
    """At most `limit_ms` at the percentile `percent` of `metric`, ttft_ms or itl_ms."""

    metric: str
    percent: int
    limit_ms: float


@dataclass
class Measured:
    """One run: what was asked, and what came of it."""

    requests: Sequence[Request]
    load: LoadRun


def ttft_ms(outcome: Outcome) -> list[float]:
    """Return the time to the first token, or how long a request had waited when it was stopped."""
    if outcome.error is not None:
        return []
    seconds = outcome.first
    if seconds is None and outcome.stopped is not None and outcome.stopped > 0:
        seconds = outcome.stopped
    return [] if seconds is None else [1000 * seconds]


def itl_ms(outcome: Outcome) -> list[float]:
    """Return the gaps between the pieces of each sample's stream."""
    return [1000 * (late - early) for times in outcome.times for early, late in pairwise(times)]


def e2e_ms(outcome: Outcome) -> list[float]:
    """Return the time to the last token of the last sample, of a complete answer."""
    if not outcome.finished or outcome.error is not None:
        return []
    return [1000 * max(times[-1] for times in outcome.times if times)]


_OF: dict[str, Callable[[Outcome], list[float]]] = {"ttft_ms": ttft_ms, "itl_ms": itl_ms, "e2e_ms": e2e_ms}


def summarize(
    rate: float,
    runs: Sequence[Measured],
    objectives: Sequence[Objective],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Return the JSON-able row of one rate, from the pooled requests of its runs.

    Latencies count from the moment a request was due, so that a slow client cannot hide a slow server.
    """
    outcomes = [outcome for run in runs for outcome in run.load.outcomes]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    seconds = sum(run.load.seconds for run in runs)
    done = [outcome for outcome in outcomes if outcome.finished and outcome.error is None]
    good = sum(meets(outcome, objectives) for outcome in done)
    row: dict[str, Any] = {
        "rate": rate,
        "offered_rate": _offered(runs),
        "runs": len(runs),
        "requests": len(outcomes),
        "completed": len(done),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "stopped_early": any(run.load.stopped for run in runs),
        "seconds": round(seconds, 3),
    }
    for metric, of in _OF.items():
        values = [[of(outcome) for outcome in run.load.outcomes] for run in runs]
        bounded = percentile_bounds(values, PERCENTS, resamples=resamples, seed=seed)
        row[metric] = {
            f"p{percent}": [_number(each.value), _number(each.low), _number(each.high)]
            for percent, each in zip(PERCENTS, bounded, strict=True)
        }
    row |= {
        "completed_per_s": round(len(done) / seconds, 4) if seconds else 0.0,
        "output_tokens_per_s": round(sum(each.count for each in outcomes) / seconds, 2) if seconds else 0.0,
        "goodput_per_s": round(good / seconds, 4) if seconds else 0.0,
        "within_objectives": round(good / len(outcomes), 5) if outcomes else 0.0,
        "lag_ms": _spread(1000 * each.sent for each in outcomes if each.sent is not None),
        "loop_lag_ms": _spread(1000 * lag for run in runs for lag in run.load.loop_lags),
    }
    row["holds"] = holds(row, objectives)
    row["client_late"] = client_late(row, objectives)
    return row


def holds(row: dict[str, Any], objectives: Sequence[Objective]) -> bool:
    """Return whether a row, without errors and not stopped early, meets every objective."""
    if row["errors"] or row["stopped_early"]:
        return False
    measured = [row[each.metric][f"p{each.percent}"][0] for each in objectives]
    return all(
        value is not None and value <= each.limit_ms for value, each in zip(measured, objectives, strict=True)
    )


def client_late(row: dict[str, Any], objectives: Sequence[Objective]) -> bool:
    """Return whether the client's own delays, at P99, are more than a tenth of the smallest objective.

    The row then tells more of the machine that the load came from than of the engine.
    """
    delays = [row[name]["p99"] for name in ("lag_ms", "loop_lag_ms") if row[name] is not None]
    return any(delay > each.limit_ms / 10 for delay in delays for each in objectives)


def meets(outcome: Outcome, objectives: Sequence[Objective]) -> bool:
    """Return whether one request is within all objectives: its time to first token, its mean gap."""
    for each in objectives:
        values = _OF[each.metric](outcome)
        if values and float(np.mean(values)) > each.limit_ms:
            return False
    return True


def allowed_late(total: int, percent: int) -> int:
    """Return how many of `total` requests may be over a limit before the percentile surely is.

    That is when the order statistic below the percentile is over it, too.
    """
    return total - int((total - 1) * percent / 100) - 1


def decode_kv_bytes(runs: Iterable[Measured], bytes_per_token: int) -> int:
    """Return the KV bytes that decoding reads when every sample reads its own, from lengths alone.

    The token that follows n others needs the KV of n; the first token of an answer is the prefill's.
    """
    tokens = 0
    for run in runs:
        for request, outcome in zip(run.requests, run.load.outcomes, strict=True):
            answered = outcome.count // request.samples
            steps = max(answered - 1, 0)
            tokens += request.samples * (steps * len(request.prompt) + steps * (steps + 1) // 2)
    return tokens * bytes_per_token


def _offered(runs: Sequence[Measured]) -> float:
    spans = sum(run.requests[-1].at - run.requests[0].at for run in runs if run.requests)
    gaps = sum(len(run.requests) - 1 for run in runs if run.requests)
    return round(gaps / spans, 4) if spans > 0 else 0.0


def _spread(values: Iterable[float]) -> dict[str, float] | None:
    found = list(values)
    if not found:
        return None
    return {
        "p50": round(float(np.percentile(found, 50)), 4),
        "p99": round(float(np.percentile(found, 99)), 4),
        "max": round(max(found), 4),
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 3) if np.isfinite(value) else None
