# SPDX-License-Identifier: Apache-2.0
"""Huge tensors that cost only the pages which are touched: zeros in reserved address space."""

from __future__ import annotations

import mmap

import torch

_NORESERVE = 0x4000  # MAP_NORESERVE: not in the mmap module of every Python version


def virtual_zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector of `count` zeros, which may be far larger than the memory of the machine."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
