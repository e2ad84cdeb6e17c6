# SPDX-License-Identifier: Apache-2.0
"""Registration of our functions as torch operators, so that ``torch.compile(fullgraph=True)`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fi_backend.core.jit.ffi import meet_torch

meet_torch()
_LIBRARY = torch.library.Library("fi_backend", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``fi_backend::<schema>``.

    schema: in torch's operator language; arguments that the operator writes are marked ``Tensor(a!)``.
    implementation: called with real tensors of the CPU or a GPU. fake: computes shapes and dtypes only.
    """
    # Library.define/impl and not custom_op, whose dispatch costs 26 us a call instead of 3 us.
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"fi_backend::{name}", fake, lib=_LIBRARY)


# Nothing is ever dropped: captured graphs hold the addresses.
_scales: dict[tuple[float, torch.device], Tensor] = {}


def scale_tensor(name: str, value: float | Tensor, device: torch.device) -> Tensor:
    """Return a dequantisation scale as a tensor on `device`: itself, or a cached float32 [1]."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a float or a float32 tensor; got {type(value).__name__}.")
    # Dynamo traces through a cache and warns about it.
    if torch.compiler.is_compiling():
        return torch.full((1,), value, dtype=torch.float32, device=device)
    key = float(value), device
    if (tensor := _scales.get(key)) is None:
        # Filled on the device: a copy from pageable memory would wait for it.
        tensor = torch.full((1,), value, dtype=torch.float32, device=device)
        # What a graph allocates holds its value only after the first replay.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return tensor
        _scales[key] = tensor
    return tensor
