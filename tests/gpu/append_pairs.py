# SPDX-License-Identifier: Apache-2.0
"""The same append on the CPU and on a CUDA device, and the comparison of all bytes they leave."""

from __future__ import annotations

from collections.abc import Callable

import torch
from append_caches import storage_bytes
from numeric import assert_bitwise_equal
from torch import Tensor

from fi_backend.core.append import append_kv

CUDA = "cuda"
Scale = float | Tensor


def any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Half ordinary numbers, half random bits: every exponent, infinities, NaN with payloads."""
    random = torch.Generator().manual_seed(seed)
    ordinary = torch.randn(shape, generator=random).to(dtype)
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max + 1, shape, generator=random, dtype=torch.int64).to(integer)
    return torch.where(torch.rand(shape, generator=random) < 0.5, ordinary, bits.view(dtype))


def on_host(*arguments: Tensor, k_scale: Scale = 1.0, v_scale: Scale = 1.0) -> None:
    """The CPU operator, which stands for what is expected; slots outside the cache are skipped."""
    key, value, k_cache, v_cache, slots = arguments
    pages, page_size = k_cache.shape[:2] if k_cache.dim() == 4 else (k_cache.shape[0], 1)
    inside = torch.where((slots >= 0) & (slots < pages * page_size), slots, -1)
    append_kv(key, value, k_cache, v_cache, inside, k_scale=k_scale, v_scale=v_scale)


def on_cuda(*arguments: Tensor, k_scale: Scale = 1.0, v_scale: Scale = 1.0) -> None:
    append_kv(*arguments, k_scale=to_cuda(k_scale), v_scale=to_cuda(v_scale))


def to_cuda(scale: Scale) -> Scale:
    return scale.to(CUDA) if isinstance(scale, Tensor) else scale


def assert_as_on_host(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    make_caches: Callable[[str], tuple[Tensor, Tensor]],
    **scales: Scale,
) -> None:
    """Append on both devices to new caches and compare all bytes of their allocations."""
    expected, actual = make_caches("cpu"), make_caches(CUDA)
    on_host(key, value, *expected, slots, **scales)
    on_cuda(key.to(CUDA), value.to(CUDA), *actual, slots.to(CUDA), **scales)
    for name, wanted, got in zip(("k_cache", "v_cache"), expected, actual, strict=True):
        assert_bitwise_equal(name, got.cpu(), wanted)
        assert torch.equal(storage_bytes(got), storage_bytes(wanted)), f"{name}: written beside the slots"
