# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: the rates that floors are computed from."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_READ_BYTES = 1 << 30
_SIDE = 2048


def cpu_ceilings(dtype: str, *, repeats: int = 7) -> dict[str, float]:
    """Measure reading memory (GB/s) and multiplying matrices of `dtype` (TFLOP/s) with torch's threads.

    The best of several is taken: a ceiling is what can be reached, not what is usual.
    """
    block = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    left = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, dtype))
    read_s = min(_seconds(block.sum) for _ in range(repeats))
    product_s = min(_seconds(lambda: left @ left) for _ in range(repeats))
    return {
        "read_gbs": round(_READ_BYTES / read_s / 1e9, 2),
        "matmul_tflops": round(2 * _SIDE**3 / product_s / 1e12, 3),
    }


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
