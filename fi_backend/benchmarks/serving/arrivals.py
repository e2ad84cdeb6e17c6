# SPDX-License-Identifier: Apache-2.0
"""When requests arrive and how long they are; no text yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Arrival:
    """One request of a trace or a generator.

    at: seconds after the first request. prompt, answer: tokens. prefix: (id, tokens) of the blocks with
    which the prompt begins; equal ids are equal tokens, and what they exceed `prompt` by is cut.
    samples: answers wanted for the prompt.
    """

    at: float
    prompt: int
    answer: int
    prefix: tuple[tuple[int, int], ...] = ()
    samples: int = 1


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the arrivals with their times stretched to `rate` requests a second on average.

    Gaps keep their proportions, so bursts stay bursts. Raises ValueError for a rate that is not positive.
    """
    if not rate > 0:
        raise ValueError(f"rate: expected > 0 requests a second; got {rate}.")
    if len(arrivals) < 2 or arrivals[-1].at == arrivals[0].at:
        return [replace(each, at=index / rate) for index, each in enumerate(arrivals)]
    first, last = arrivals[0].at, arrivals[-1].at
    factor = (len(arrivals) - 1) / rate / (last - first)
    return [replace(each, at=(each.at - first) * factor) for each in arrivals]


def arrival_times(count: int, cv: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return `count` increasing times with gaps of mean 1.

    cv: standard deviation of the gaps over their mean: 0 even spacing, 1 Poisson, above 1 bursts
    (gamma-distributed gaps). Raises ValueError for a negative cv.
    """
    if cv < 0:
        raise ValueError(f"cv: expected >= 0; got {cv}.")
    if cv == 0:
        return np.arange(count, dtype=np.float64)
    gaps = rng.gamma(1 / cv**2, cv**2, size=max(count - 1, 0))
    return np.concatenate([[0.0], np.cumsum(gaps)])[:count]
