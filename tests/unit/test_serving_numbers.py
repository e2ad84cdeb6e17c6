# SPDX-License-Identifier: Apache-2.0
"""Numbers of the serving benchmark: percentiles, bounds, rows and the search for the highest rate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fi_backend.benchmarks.serving.bounds import percentile_bounds, weighted_percentiles
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome, Request
from fi_backend.benchmarks.serving.search import highest_rate
from fi_backend.benchmarks.serving.summary import (
    Measured,
    Objective,
    allowed_late,
    decode_kv_bytes,
    summarize,
)

PERCENTS = (0, 37.5, 50, 90, 99, 100)


def test_weighted_percentiles_are_those_of_repeated_values() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.sort(rng.normal(size=rng.integers(1, 40)))
        weights = rng.integers(0, 5, size=len(values))
        weights[rng.integers(len(values))] += 1
        expected = np.percentile(np.repeat(values, weights), PERCENTS)
        np.testing.assert_allclose(weighted_percentiles(values, weights, PERCENTS), expected, rtol=1e-12)


def test_bounds_are_those_of_scipy() -> None:
    """One request after the other, drawn one by one: the bootstrap of scipy."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    values = np.random.default_rng(3).lognormal(size=400)
    [ours] = percentile_bounds([[[value] for value in values]], [90], resamples=4000, block=1)
    theirs = stats.bootstrap(
        (values,),
        lambda sample, axis: np.percentile(sample, 90, axis=axis),
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(4),
    ).confidence_interval
    assert ours.value == pytest.approx(np.percentile(values, 90))
    assert ours.low == pytest.approx(theirs.low, rel=0.03)
    assert ours.high == pytest.approx(theirs.high, rel=0.03)


def test_neighbours_that_wait_together_widen_the_bounds() -> None:
    """In a series whose blocks of 20 are equal, there are a twentieth as many independent values."""
    levels = np.repeat(np.random.default_rng(5).normal(size=50), 20)
    runs = [[[value] for value in levels]]
    [alone], [blocks] = (percentile_bounds(runs, [50], block=block) for block in (1, 20))
    assert blocks.high - blocks.low > 2.5 * (alone.high - alone.low)


def test_requests_are_drawn_with_all_of_their_values() -> None:
    """Two hundred equal gaps of one request are one observation."""
    gaps = np.random.default_rng(6).normal(size=30)
    [apart] = percentile_bounds([[[gap] for gap in gaps]], [50], block=1)
    [many] = percentile_bounds([[[gap] * 200 for gap in gaps]], [50], block=1)
    assert many.high - many.low == pytest.approx(apart.high - apart.low, rel=0.35)


def test_nothing_measured_has_no_percentile() -> None:
    [nothing] = percentile_bounds([[[], []], []], [99])
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.high)


def outcome(first: float, gaps: tuple[float, ...] = (0.01,), *, sent: float = 0.001) -> Outcome:
    made = Outcome(sent=sent)
    made.take(0, [1], first)
    for gap in gaps:
        made.take(0, [1], made.times[0][-1] + gap)
    made.ended = 1
    return made


def measured(outcomes: list[Outcome], seconds: float = 10.0) -> Measured:
    requests = [Request([1] * 100, 2, at=float(index)) for index in range(len(outcomes))]
    return Measured(requests, LoadRun(outcomes, seconds, [0.0, 0.002]))


TTFT = Objective("ttft_ms", 99, 200.0)


def test_a_row() -> None:
    runs = [measured([outcome(0.1), outcome(0.1, (0.02, 0.04), sent=0.004)]), measured([outcome(0.3)])]
    row = summarize(2.0, runs, [TTFT])
    assert row["ttft_ms"]["p50"] == [100.0, 100.0, 100.0]  # of every run as many are drawn as it has
    assert row["itl_ms"]["p50"][0] == 15.0
    assert (row["requests"], row["completed"], row["errors"], row["runs"]) == (3, 3, 0, 2)
    assert row["output_tokens_per_s"] == round(7 / 20, 2)
    assert row["goodput_per_s"] == 0.1  # two of three within 200 ms, in 20 s
    assert row["within_objectives"] == round(2 / 3, 5)
    assert row["offered_rate"] == 1.0
    assert (row["lag_ms"]["max"], row["loop_lag_ms"]["max"]) == (4.0, 2.0)
    assert row["holds"] is False
    assert summarize(2.0, runs, [Objective("ttft_ms", 99, 301.0)])["holds"] is True
    assert summarize(2.0, runs, [Objective("itl_ms", 50, 14.0)])["holds"] is False


def test_a_client_that_is_late_is_told() -> None:
    late = measured([outcome(0.1, sent=0.021)])
    assert summarize(1.0, [late], [TTFT])["client_late"] is True
    assert summarize(1.0, [late], [Objective("ttft_ms", 99, 300.0)])["client_late"] is False
    stuck = measured([outcome(0.1)])
    stuck.load.loop_lags = [0.03] * 10
    assert summarize(1.0, [stuck], [TTFT])["client_late"] is True


def test_an_error_keeps_a_rate_from_holding() -> None:
    failed = Outcome(sent=0.0, error="status 500")
    row = summarize(1.0, [measured([outcome(0.01), failed])], [TTFT])
    assert (row["errors"], row["first_error"], row["holds"]) == (1, "status 500", False)
    assert row["ttft_ms"]["p99"][0] == 10.0


def test_a_stopped_request_counts_with_the_time_that_it_waited() -> None:
    waiting, unsent = Outcome(sent=0.0, stopped=0.5), Outcome(stopped=-2.0)
    row = summarize(1.0, [measured([waiting, unsent])], [TTFT])
    assert row["ttft_ms"]["p99"][0] == 500.0
    assert row["errors"] == 0
    assert row["lag_ms"]["max"] == 0.0


def test_without_any_answer_a_rate_does_not_hold() -> None:
    row = summarize(1.0, [measured([Outcome()])], [TTFT])
    assert row["ttft_ms"]["p99"] == [None, None, None]
    assert row["holds"] is False


@pytest.mark.parametrize("total", [2, 3, 50, 100, 101, 199, 200, 1000])
def test_the_late_requests_that_lose_a_rate(total: int) -> None:
    """One more late request than allowed puts the percentile over the limit, whatever the others are."""
    allowed = allowed_late(total, 99)
    values = np.zeros(total)
    values[: allowed + 1] = 1e6
    assert np.percentile(values, 99) == 1e6
    values[allowed] = 0
    assert np.percentile(values, 99) < 1e6


def test_kv_bytes_of_decoding() -> None:
    run = measured([outcome(0.1, (0.01, 0.01, 0.01))])  # four tokens after a prompt of 100
    assert decode_kv_bytes([run], 8) == 8 * (101 + 102 + 103)


def server(capacity: float):  # type: ignore[no-untyped-def]
    """A queue whose P99 leaves the objective above `capacity`."""
    return lambda rate: rate <= capacity


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.99, 4.0, 11.3, 63.0])
@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_the_search_brackets_the_capacity(capacity: float, tolerance: float) -> None:
    found = highest_rate(server(capacity), low=0.25, high=64, start=4, tolerance=tolerance)
    assert found.rate is not None
    assert found.failed is not None
    assert found.rate <= capacity < found.failed
    assert found.failed / found.rate <= 1 + tolerance
    assert len({rate for rate, _ in found.probes}) == len(found.probes) <= 16


def test_the_search_ends_at_the_ends_of_its_range() -> None:
    nothing = highest_rate(server(0.1), low=0.25, high=64, start=4)
    assert (nothing.rate, nothing.failed) == (None, 0.25)
    everything = highest_rate(server(1e9), low=0.25, high=64, start=4)
    assert (everything.rate, everything.failed) == (64, None)


def test_a_tolerance_finer_than_the_rates_ends() -> None:
    found = highest_rate(server(3.0), low=0.25, high=64, start=4, tolerance=1e-12)
    assert found.rate == pytest.approx(3.0, rel=1e-4)


def test_a_queue_is_searched_through_its_latencies() -> None:
    """A simulated server of one worker, 50 ms a request, even arrivals: it holds just below 20 a second."""

    def holds(rate: float) -> bool:
        free, outcomes, requests = 0.0, [], []
        for index in range(600):
            at = index / rate
            free = max(free, at) + 0.05
            outcomes.append(outcome(free - at))
            requests.append(Request([1], 2, at=at))
        row = summarize(rate, [Measured(requests, LoadRun(outcomes, free))], [TTFT], resamples=20)
        return bool(row["holds"])

    found = highest_rate(holds, low=1, high=100, start=5, tolerance=0.02)
    assert found.rate == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"low": 0.0, "high": 1.0, "start": 1.0}, "0 < low <= start <= high"),
        ({"low": 1.0, "high": 2.0, "start": 4.0}, "0 < low <= start <= high"),
        ({"low": 1.0, "high": 2.0, "start": 1.0, "tolerance": 0.0}, "tolerance: expected > 0"),
    ],
)
def test_a_range_that_is_none(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        highest_rate(server(1), **arguments)
