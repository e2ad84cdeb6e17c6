# SPDX-License-Identifier: Apache-2.0
"""How sure a ratio of two measured times is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# 95 % quantiles of Student's t by degrees of freedom, 1 to 10. More degrees take the last: slightly wide.
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


def ratio_with_upper_bound(ours: Sequence[float], peer: Sequence[float]) -> tuple[float, float]:
    """Return ours / peer and its upper 95 % bound, one-sided, from the paired medians of n >= 2 runs.

    With x_i = ln(ours_i / peer_i): exp(mean(x)) and exp(mean(x) + t(0.95, n - 1) * sd(x) / sqrt(n)). Pairs
    come from the same run, so that what slows the whole machine slows both.
    Raises ValueError for series of different or too small length.
    """
    if len(ours) != len(peer) or len(ours) < 2:
        raise ValueError(
            f"ours, peer: expected two series of one length, 2 or more; got {len(ours)} and {len(peer)}."
        )
    logs = [math.log(a / b) for a, b in zip(ours, peer, strict=True)]
    mean = statistics.fmean(logs)
    error = statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean + _T95[min(len(logs) - 1, len(_T95)) - 1] * error)
