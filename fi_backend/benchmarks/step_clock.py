# SPDX-License-Identifier: Apache-2.0
"""Timing of one step on the device where it runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def step_clock(step: Callable[[], Tensor], device: torch.device, *, repeats: int = 9) -> Callable[[], float]:
    """Return a function that measures `step` once more, in microseconds.

    On CUDA the median of replays of a captured graph; on a CPU that of `repeats` calls in the time of this
    thread, which other work on the machine does not lengthen: one thread has to do all of the work. The first
    call, which compiles, is not measured.
    """
    if device.type == "cuda":
        from fi_backend.benchmarks.cuda.graphs import CapturedGraph

        return CapturedGraph(device, step).time_us
    step()

    def once() -> float:
        begin = time.thread_time()
        step()
        return (time.thread_time() - begin) * 1e6

    return lambda: statistics.median(once() for _ in range(repeats))
