# SPDX-License-Identifier: Apache-2.0
"""The figures of a load for the scripts' records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.summary import itl_ms, ttft_ms

PERCENTILES = (50, 90, 99)


def latencies(run: LoadRun) -> dict[str, dict[str, float]]:
    """Return time to first token and gaps between pieces, in milliseconds, and lags(); no failed requests."""
    good = [outcome for outcome in run.outcomes if outcome.error is None]
    return {
        "ttft_ms": percentiles([value for outcome in good for value in ttft_ms(outcome)]),
        "itl_ms": percentiles([value for outcome in good for value in itl_ms(outcome)]),
        **lags([run]),
    }


def lags(runs: Sequence[LoadRun]) -> dict[str, dict[str, float]]:
    """Return how late the client was, in milliseconds: sending requests, and waking up to read answers.

    Both are in the times of the answers, which count from when a request was due.
    """
    sent = [outcome.sent for run in runs for outcome in run.outcomes if outcome.sent is not None]
    return {
        "lag_ms": percentiles([1000 * value for value in sent]),
        "loop_lag_ms": percentiles([1000 * value for run in runs for value in run.loop_lags]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return PERCENTILES of some values, and how many they are."""
    if not values:
        return {"count": 0}
    found: dict[str, Any] = {
        f"p{percent}": round(float(value), 3)
        for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
    }
    return found | {"count": len(values)}
