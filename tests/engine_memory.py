# SPDX-License-Identifier: Apache-2.0
"""Memory as engines lay it out, full of poison: KV caches of any strides, tables that point into them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fi_backend.core.page_table import PageTable

POISON_BYTE = 0xFF  # NaN in every float format, fp8 included
GARBAGE_IDS = (-1, -(2**31), 2**31 - 1, 123_456_789)
RAGGED_START = 3  # contiguous KV begins behind a few tokens of somebody else


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the engine lays out its memory; every field is independent of the others."""

    table: str = "block"  # block | token | csr | ragged
    k: str = "nhd"  # nhd | hnd | packed | strided | heads
    v: str = "nhd"
    q: str = "plain"  # plain | qkv
    out: str = "plain"  # plain | heads
    raw_fp8: bool = False
    first_token: int = 0  # query tokens before the batch
    extra_tokens: int = 0  # and behind it


def poison(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor of NaN."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.full((math.prod(shape) * size,), POISON_BYTE, dtype=torch.uint8).view(dtype).view(shape)


def move(device: str | torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors on `device`, with the memory round them; those that share memory still share it."""
    memories: dict[int, Tensor] = {}
    moved = []
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() not in memories:
            memories[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).to(device)
        memory = memories[storage.data_ptr()].view(t.dtype)
        moved.append(memory.as_strided(t.shape, t.stride(), t.storage_offset()))
    return tuple(moved)


def kv_cache(kind: str, dtype: torch.dtype, pages: int, page_size: int, heads: int, dim: int) -> Tensor:
    """Poisoned memory, seen as [pages, page_size, heads, dim]."""
    if kind == "hnd":
        return poison(dtype, pages, heads, page_size, dim).transpose(1, 2)
    if kind == "strided":  # the pages of several layers lie side by side
        return poison(dtype, pages, 3, page_size, heads, dim)[:, 1]
    if kind == "heads":
        return poison(dtype, pages, page_size, heads + 1, dim + 16)[:, :, 1:, :dim]
    return poison(dtype, pages, page_size, heads, dim)


def kv_caches(
    layout: Layout, dtype: torch.dtype, pages: int, page_size: int, heads: int, dim: int, dim_v: int
) -> tuple[Tensor, Tensor]:
    """K and V caches; where both are "packed" they are two halves of one tensor."""
    if layout.k == layout.v == "packed":
        both = kv_cache("hnd", dtype, pages, page_size, heads, dim + dim_v)
        return both[..., :dim], both[..., dim:]
    return (
        kv_cache(layout.k, dtype, pages, page_size, heads, dim),
        kv_cache(layout.v, dtype, pages, page_size, heads, dim_v),
    )


def choose_pages(
    layout: Layout, kv_lens: tuple[int, ...], page_size: int, random: torch.Generator
) -> tuple[list[list[int]], int]:
    """The page ids of each request, in no order, and the number of pages in the cache."""
    if layout.table == "ragged":
        start, pages = RAGGED_START, []
        for n in kv_lens:
            pages.append(list(range(start, start + n)))
            start += n
        return pages, start + 2
    counts = [-(-n // page_size) for n in kv_lens]
    ids = torch.randperm(sum(counts) + 3, generator=random).tolist()
    return [[ids.pop() for _ in range(count)] for count in counts], sum(counts) + 3


def page_table(
    kind: str, pages: list[list[int]], kv_lens: Tensor, page_size: int, random: torch.Generator
) -> PageTable:
    """The pages as one of the engines' index structures, garbage behind the end of each row.

    It lies on the device of kv_lens.
    """
    device = kv_lens.device
    if kind == "ragged":
        bounds = torch.tensor([RAGGED_START, *kv_lens.tolist()], dtype=torch.int64).cumsum(0)
        return PageTable.ragged(bounds.to(device))
    if kind == "csr":
        indptr = torch.tensor([0, *map(len, pages)]).cumsum(0).to(device, torch.int32)
        flat = torch.tensor([page for row in pages for page in row], dtype=torch.int32, device=device)
        return PageTable.from_csr(indptr, flat, page_size=page_size, kv_lens=kv_lens)
    step = page_size if kind == "token" else 1
    width = (max(map(len, pages), default=0) + 2) * step
    rows = len(pages) + 2
    memory = torch.tensor(GARBAGE_IDS, dtype=torch.int32).repeat(rows * (width + 5))
    table = memory[: rows * (width + 5)].view(rows, width + 5)[:, :width]
    order = (
        torch.randperm(rows, generator=random)[: len(pages)] if kind == "token" else torch.arange(len(pages))
    )
    for row, ids in zip(order.tolist(), pages, strict=True):
        for position, page in enumerate(ids):
            slots = torch.arange(step) + page * step if page >= 0 else torch.full((step,), -1)
            table[row, position * step : (position + 1) * step] = slots.to(torch.int32)
    [table] = move(device, table)
    if kind == "token":
        return PageTable.from_token_table(table, order.to(device), kv_lens, page_size=page_size)
    return PageTable.from_block_table(table[: len(pages)], kv_lens, page_size=page_size)
