# SPDX-License-Identifier: Apache-2.0
"""KV caches in the layouts of serving engines, for the tests of append_kv on every device."""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("separate", "packed", "heads first", "contiguous", "unaligned")
FILL = 1.5


def caches(
    layout: str,
    pages: int,
    page_size: int,
    heads: int,
    dims: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Caches of K and V full of FILL; "contiguous" ones have no pages but pages * page_size tokens.

    In "packed" and "heads first" ones K and V lie side by side, which takes one dtype for both. Rows of
    "unaligned" ones start one element past a multiple of 16 bytes.
    """
    if layout == "contiguous":
        shapes = [(pages * page_size, heads, dim) for dim in dims]
        k, v = (full(shape, dtype, device) for shape, dtype in zip(shapes, dtypes, strict=True))
        return k, v
    if layout in ("separate", "unaligned"):
        gap = 16 if layout == "unaligned" else 0
        wide = [
            full((pages, page_size, heads, d + gap), t, device) for d, t in zip(dims, dtypes, strict=True)
        ]
        start = 1 if gap else 0
        return wide[0][..., start : start + dims[0]], wide[1][..., start : start + dims[1]]
    assert dtypes[0] is dtypes[1], "one allocation has one dtype"
    if layout == "packed":
        both = full((pages, page_size, heads, sum(dims)), dtypes[0], device)
    else:
        both = full((pages, heads, page_size, sum(dims)), dtypes[0], device).transpose(1, 2)
    return both[..., : dims[0]], both[..., dims[0] :]


def full(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of FILL; fp8 dtypes lack torch's own."""
    return torch.full(shape, FILL, device=device).to(dtype)


def storage_bytes(tensor: Tensor) -> Tensor:
    """Every byte of the allocation that `tensor` is a view of, as uint8 on the host."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).cpu()
