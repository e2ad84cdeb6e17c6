# SPDX-License-Identifier: Apache-2.0
"""Finds the highest rate that a server sustains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sustained:
    """rate: highest that was seen to hold, or None. failed: lowest that was seen not to, or None.

    probes: the rates tried, in order, and whether each held.
    """

    rate: float | None
    failed: float | None
    probes: tuple[tuple[float, bool], ...]


def held_below(held: Mapping[float, bool]) -> tuple[float | None, float | None]:
    """Return the highest rate that held below the lowest that did not, and that one; None for none.

    A rate above one that did not hold held by luck.
    """
    failed = min((rate for rate, good in held.items() if not good), default=None)
    return max((rate for rate in held if failed is None or rate < failed), default=None), failed


def highest_rate(
    holds: Callable[[float], bool], *, low: float, high: float, start: float, tolerance: float = 0.05
) -> Sustained:
    """Bisect for the highest rate that holds, between `low` and `high`.

    holds: measures one rate. start: the first one tried; it is doubled or halved until the answer changes
    or the end of the range is reached, then the bracket is halved (geometrically) until failed / rate <=
    1 + tolerance. Raises ValueError unless 0 < low <= start <= high and tolerance > 0.
    """
    if not 0 < low <= start <= high:
        raise ValueError(f"start: expected 0 < low <= start <= high; got {low}, {start} and {high}.")
    if not tolerance > 0:
        raise ValueError(f"tolerance: expected > 0; got {tolerance}.")
    probes: list[tuple[float, bool]] = []

    def probe(rate: float) -> bool:
        rate = float(f"{rate:.6g}")
        probes.append((rate, holds(rate)))
        return probes[-1][1]

    good: float | None = None
    bad: float | None = None
    rate = start
    while good is None or bad is None:
        if probe(rate):
            good = probes[-1][0]
            if rate >= high or bad is not None:
                break
            rate = min(rate * 2, high)
        else:
            bad = probes[-1][0]
            if rate <= low or good is not None:
                break
            rate = max(rate / 2, low)
    while good is not None and bad is not None and bad / good > 1 + tolerance:
        held, rate = probe((good * bad) ** 0.5), probes[-1][0]
        if rate in (good, bad):  # rounding leaves nothing between
            break
        good, bad = (rate, bad) if held else (good, rate)
    return Sustained(good, bad, tuple(probes))
