# SPDX-License-Identifier: Apache-2.0
"""Everything a spec runs, compiled before the first request could wait for it."""

from __future__ import annotations

import torch

from fi_backend.core import jit, kernels, ops_module, planner
from fi_backend.core.jit.arch import cuda_arch
from fi_backend.core.spec import AttentionSpec


def prepare(*specs: AttentionSpec, device: torch.device | str = "cpu") -> None:
    """Build, in one parallel run, the modules that `specs` need on `device`.

    That is: attention, cache appends and merges, and the planners. Returns at once when they are in the
    cache. Raises BuildError.
    """
    arch = "cpu" if torch.device(device).type == "cpu" else cuda_arch(device)
    jit.build_all(modules(*specs, arch=arch))


def modules(*specs: AttentionSpec, arch: str) -> list[jit.ModuleSpec]:
    """Return the modules that `specs` need on a target, without repetition.

    arch: "cpu", or a CUDA target such as "sm_90a", for which no device has to be here.
    """
    if arch == "cpu":
        attention = [kernels.attention_module(spec) for spec in specs]
        return list(dict.fromkeys([planner.MODULE, kernels.OPS_MODULE, *attention]))
    common = [planner.MODULE, planner.cuda_module(arch), ops_module.cuda_ops_module(arch)]
    return list(dict.fromkeys([*common, *(kernels.cuda_attention_module(spec, arch) for spec in specs)]))
