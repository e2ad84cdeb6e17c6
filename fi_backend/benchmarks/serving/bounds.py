# SPDX-License-Identifier: Apache-2.0
"""Percentiles of pooled requests and how sure they are: the bootstrap over blocks of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bounded:
    """A percentile with its two-sided bootstrap bounds; all NaN where nothing was measured."""

    value: float
    low: float
    high: float


def percentile_bounds(
    runs: Sequence[Sequence[Sequence[float]]],
    percents: Sequence[float],
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    block: int | None = None,
    seed: int = 0,
) -> list[Bounded]:
    """Return each percentile of all values with bounds.

    runs: for each run the requests in order of arrival, for each request its values (one time to first
    token, or all gaps between tokens). Requests are drawn with all of their values, and in blocks of
    `block` neighbours of one run (default: cube root of the run's length), since neighbours wait in one
    queue: drawn one by one they would look independent and the bounds too narrow.
    """
    owners: list[int] = []
    values: list[float] = []
    offsets = np.cumsum([0, *(len(run) for run in runs)])
    for offset, run in zip(offsets, runs, strict=False):
        for index, request in enumerate(run):
            owners += [int(offset) + index] * len(request)
            values += request
    if not values:
        return [Bounded(float("nan"), float("nan"), float("nan")) for _ in percents]
    order = np.argsort(values, kind="stable")
    ordered, owner = np.asarray(values, np.float64)[order], np.asarray(owners)[order]
    rng = np.random.default_rng(seed)
    drawn = np.empty((resamples, len(percents)))
    used = 0
    for _ in range(resamples):
        weights = _resample([len(run) for run in runs], block, rng)[owner]
        if weights.any():
            drawn[used] = weighted_percentiles(ordered, weights, percents)
            used += 1
    tail = 50 * (1 - confidence)
    points = weighted_percentiles(ordered, np.ones(len(ordered), np.int64), percents)
    lows, highs = np.percentile(drawn[:used], (tail, 100 - tail), axis=0)
    return [
        Bounded(float(value), float(low), float(high))
        for value, low, high in zip(points, lows, highs, strict=True)
    ]


def weighted_percentiles(
    ordered: _Floats, weights: npt.NDArray[np.int64], percents: Sequence[float]
) -> _Floats:
    """Return what np.percentile gives for `ordered` with every value repeated `weights` times.

    ordered: increasing. weights: not all 0.
    """
    upto = np.cumsum(weights)
    place = (upto[-1] - 1) * np.asarray(percents, np.float64) / 100
    below = np.floor(place)
    low = ordered[np.searchsorted(upto, below, side="right")]
    high = ordered[np.searchsorted(upto, np.minimum(below + 1, upto[-1] - 1), side="right")]
    result: _Floats = low + (high - low) * (place - below)
    return result


def _resample(lengths: Sequence[int], block: int | None, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """How often each request is drawn, run after run: circular blocks until the run has its length again."""
    counts = []
    for length in lengths:
        size = min(block or max(1, round(length ** (1 / 3))), max(length, 1))
        starts = rng.integers(length, size=-(-length // size)) if length else np.zeros(0, np.int64)
        drawn = (starts[:, None] + np.arange(size)).ravel()[:length] % max(length, 1)
        counts.append(np.bincount(drawn, minlength=length))
    return np.concatenate(counts).astype(np.int64)
