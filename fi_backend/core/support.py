# SPDX-License-Identifier: Apache-2.0
"""Which combinations of spec and device exist; asked before anything is compiled or launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_backend.core.jit.arch import cuda_arch, device_kind
from fi_backend.core.kernel_choice import CPU, choose
from fi_backend.core.planner import CostModel
from fi_backend.core.spec import FP8_DTYPES, AttentionSpec
from fi_backend.core.variant import AttentionVariant

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")
CUDA_HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128))
CUDA_DTYPES = ("float16", "bfloat16")
# Kernels step over keys by whole tiles in 32 bits.
MAX_KV_LEN = 2**31 - 128
# The largest KV tile of the CUDA kernels: a state ends between two of them.
_CUDA_KV_TILE = 64


def unsupported_reason(
    spec: AttentionSpec, device: str | torch.device, variant: AttentionVariant | None = None
) -> str | None:
    """Return why `spec` with `variant` cannot run on `device`, or None when it can.

    Compiles and launches nothing.
    """
    kind = device_kind(device)
    if variant is not None and spec.sinks and not variant.softmax:
        return f"sinks: expected False with variant {variant.name}, which has no softmax; got True."
    if kind not in DEVICES:
        return f"device: this version has kernels for {', '.join(DEVICES)}; got {kind!r}."
    return _cuda_reason(spec) if kind == "cuda" else None


def query_tiles(
    spec: AttentionSpec,
    device: str | torch.device,
    variant: AttentionVariant | None = None,
    *,
    arch: str | None = None,
    kernel: str | None = None,
) -> tuple[int, int]:
    """Return the least and the greatest query tile that the kernels of `device` have for `spec`.

    arch: the device's target, such as "sm_90a"; by default torch is asked. kernel: a name of kernel_choice's
    instead of the best one. Raises ValueError as kernel_choice.choose() does.
    """
    if device_kind(device) == "cpu":
        return choose(spec, CPU, variant, name=kernel).tiles
    return choose(spec, arch or cuda_arch(device), variant, name=kernel).tiles


def cost_model(spec: AttentionSpec, device: torch.device | str, costs: CostModel | None) -> CostModel:
    """Return `costs`, by default those of the device; raises ValueError for a grid that kernels lack."""
    chosen = costs or CostModel.for_device(device)
    if device_kind(device) == "cuda" and spec.batch_invariant and chosen.invariant_grid % _CUDA_KV_TILE:
        raise ValueError(
            f"costs.invariant_grid: on CUDA expected a multiple of {_CUDA_KV_TILE} tokens, the kernels' KV "
            f"tile; got {chosen.invariant_grid}."
        )
    return chosen


def resolve(device: str | torch.device) -> torch.device:
    """Return `device` with its index: the current one of CUDA where none is named."""
    import torch

    named = torch.device(device)
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named


def default_workers(device: torch.device) -> int:
    """Return how many workers share a launch: torch's intra-op threads, or one CTA a multiprocessor."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.get_num_threads()


def _cuda_reason(spec: AttentionSpec) -> str | None:
    if spec.dtype not in CUDA_DTYPES:
        return f"dtype: on CUDA expected {' or '.join(CUDA_DTYPES)}; got {spec.dtype}."
    if spec.kv_dtype != spec.dtype and spec.kv_dtype not in FP8_DTYPES:
        return (
            f"kv_dtype: on CUDA expected the dtype of the queries or {', '.join(FP8_DTYPES)}; "
            f"got {spec.kv_dtype} for {spec.dtype} queries."
        )
    if (spec.head_dim, spec.head_dim_v) not in CUDA_HEAD_DIMS:
        dims = ", ".join(str(k) if k == v else f"({k}, {v})" for k, v in CUDA_HEAD_DIMS)
        return (
            f"head_dim, head_dim_v: on CUDA expected one of {dims}; got {spec.head_dim}, {spec.head_dim_v}."
        )
    if spec.group_size > 64:
        return f"num_qo_heads: on CUDA expected at most 64 for each KV head; got {spec.group_size}."
    return None
