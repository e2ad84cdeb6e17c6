# SPDX-License-Identifier: Apache-2.0
"""The native module of append_kv, merges and packing of masks: one for the CPU, one for each CUDA target."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from fi_backend.core import jit
from fi_backend.core.jit.arch import cuda_arch
from fi_backend.core.kernels import OPS_MODULE

if TYPE_CHECKING:
    import torch


def cuda_ops_module(arch: str) -> jit.ModuleSpec:
    """The module for a CUDA target such as "sm_90a"."""
    return jit.ModuleSpec(
        name="cuda_ops",
        sources=("cuda/append.cu", "cuda/merge.cu", "cuda/pack_mask.cu", "bind/cuda_ops.cc"),
        arch=arch,
    )


def ops_module(device: torch.device) -> jit.ModuleSpec:
    """The module that serves tensors of `device`."""
    return OPS_MODULE if device.type == "cpu" else cuda_ops_module(cuda_arch(device))


def native_ops(name: str, device: torch.device) -> Any:
    """Build or load the module for the tensor `name` that lies on `device`.

    Raises ValueError that names it unless the device is a CPU or a CUDA one.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name}: expected a tensor of a CPU or a CUDA device; got {device}.")
    return _loaded(device)


@cache
def _loaded(device: torch.device) -> Any:
    return jit.load(ops_module(device))
