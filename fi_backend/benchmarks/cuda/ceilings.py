# SPDX-License-Identifier: Apache-2.0
"""What the GPU can do at best, measured in the process that measures the kernels."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from fi_backend.core import jit
from fi_backend.core.jit.arch import cuda_arch

_BYTES = 8 << 30
_SIDE = 8192


def read_module(arch: str) -> jit.ModuleSpec:
    """The module with the kernel that only reads, for a CUDA target such as "sm_90a"."""
    return jit.ModuleSpec(
        name="cuda_bench",
        sources=("cuda/read_bandwidth.cu", "bind/cuda_bench.cc"),
        arch=arch,
    )


def cuda_ceilings(device: torch.device, *, repeats: int = 10) -> dict[str, float]:
    """Measure reading and copying memory (GB/s; a copy counts both ways) and bf16 products (TFLOP/s).

    On random data, for a product of zeros draws less power and runs faster; medians. Takes 16 GiB.
    """
    read_all = jit.load(read_module(cuda_arch(device))).read_all
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    source = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    source.view(torch.int64).random_()
    target = torch.empty_like(source)
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    read_s = _seconds(lambda: read_all(source, sink, sms), repeats)
    copy_s = _seconds(lambda: target.copy_(source), repeats)
    left, right = torch.randn(2, _SIDE, _SIDE, dtype=torch.bfloat16, device=device)
    product_s = _seconds(lambda: left @ right, repeats)
    return {
        "read_gbs": round(_BYTES / read_s / 1e9, 1),
        "copy_gbs": round(2 * _BYTES / copy_s / 1e9, 1),
        "matmul_tflops": round(2 * _SIDE**3 / product_s / 1e12, 1),
    }


def _seconds(call: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        call()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1000
