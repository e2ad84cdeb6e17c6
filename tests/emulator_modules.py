# SPDX-License-Identifier: Apache-2.0
"""Attention modules in which the source of the GPU's kernel runs on an emulated machine, for CPU tensors.

Threads are fibers, in a random order at every wait; asynchronous copies and products take place at random
moments between their start and the wait for them. Unseen remain speed and the memory model, but for the
fences in front of bulk copies of what stmatrix wrote and of wgmma behind a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention_batch
import torch

from fi_backend.core import jit, kernels, support
from fi_backend.core.planner import CostModel
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant

FOLDER = Path(__file__).parent / "emulator"
HEADERS = FOLDER / "include"


def headers() -> tuple[tuple[str, str], ...]:
    """What takes the place of CUDA's headers and of the PTX wrappers."""
    files = (*HEADERS.glob("*.h"), *HEADERS.glob("ptx/*.cuh"))
    return tuple((str(file.relative_to(HEADERS)), file.read_text()) for file in sorted(files))


def attention_module(
    spec: AttentionSpec,
    arch: str,
    further: tuple[tuple[str, str], ...] = (),
    variant: AttentionVariant | None = None,
    kernel: str | None = None,
) -> jit.ModuleSpec:
    """The module of `spec` for the GPU `arch`, emulated, with further defines."""
    module = kernels.cuda_attention_module(spec, arch, variant, kernel)
    return replace(
        module,
        name="_".join((module.name, arch, *(name.lower() for name, _ in further), "emulated")),
        sources=(str(FOLDER / "attention.cc"),),
        defines=module.defines + further,
        arch="cpu",
        generated=headers(),
        recipe="",
    )


def install(
    arch: str,
    put: Callable[[Any, str, Any], None] = setattr,
    further: tuple[tuple[str, str], ...] = (),
) -> None:
    """From now on attention over CPU tensors runs the kernels for GPUs, under plans as GPUs get them.

    put: how attributes are set, such as MonkeyPatch.setattr. further: defines of the modules.
    """
    query_tiles, cost_model = support.query_tiles, support.cost_model

    def module(
        spec: AttentionSpec,
        device: str | torch.device = "cpu",
        variant: AttentionVariant | None = None,
        kernel: str | None = None,
    ) -> jit.ModuleSpec:
        return attention_module(spec, arch, further, variant, kernel)

    def tiles(
        spec: AttentionSpec,
        device: str | torch.device,
        variant: AttentionVariant | None = None,
        kernel: str | None = None,
        **_: object,
    ) -> tuple[int, int]:
        return query_tiles(spec, "cuda", variant, arch=arch, kernel=kernel)

    def costs(spec: AttentionSpec, device: str | torch.device, costs: CostModel | None) -> CostModel:
        return cost_model(spec, "cuda", costs)

    put(kernels, "attention_module", module)
    for user in (support, attention_batch):
        put(user, "query_tiles", tiles)
    put(support, "cost_model", costs)
