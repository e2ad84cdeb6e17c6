# SPDX-License-Identifier: Apache-2.0
"""Registration of our functions as torch operators, so that ``torch.compile(fullgraph=True)`` takes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fi_backend", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``fi_backend::<schema>``.

    schema: in torch's operator language; arguments that the operator writes are marked ``Tensor(a!)``.
    implementation: called with real tensors. fake: computes shapes and dtypes only.
    """
    # Library.define/impl and not custom_op, whose dispatch costs 26 us a call instead of 3 us.
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CPU")
    torch.library.register_fake(f"fi_backend::{name}", fake, lib=_LIBRARY)


@lru_cache(maxsize=256)
def _cached_scale(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


def scale_tensor(name: str, value: float | Tensor) -> Tensor:
    """Return a dequantisation scale as a tensor: itself, or a cached float32 [1]."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a float or a float32 tensor; got {type(value).__name__}.")
    # Dynamo traces through a cache and warns about it.
    if torch.compiler.is_compiling():
        return torch.tensor([value], dtype=torch.float32)
    return _cached_scale(float(value))
