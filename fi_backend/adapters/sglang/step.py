# SPDX-License-Identifier: Apache-2.0
"""The index arrays of one step: zero-copy views of SGLang's table, or snapshots that a graph may read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.adapters.host_plan import copy_lengths, may_wait
from fi_backend.core.custom_mask import PackedMask
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant

from .radix import Path
from .translate import Lengths, indptr


class Kind(NamedTuple):
    """What one plan serves: layers of one spec and variant whose KV lies in one pool.

    windowed: that of the sliding windows.
    """

    spec: AttentionSpec
    windowed: bool
    variant: AttentionVariant | None = None


@dataclass
class Step:
    """One step: its index arrays, and which kinds of layers are planned for it.

    qo_indptr_host, kv_lens_host: None where the host does not know them. tables: by pool, True:
    that of the windows.
    window_slots: of the step's tokens in the pool of the windows, once they are known. mask: of the trees
    that the step verifies. paths: of its requests in the radix tree, None where they are not known. mode: of
    the forward pass. num_requests, num_tokens: without padding. captures: a graph of the step is about to be
    captured.
    """

    qo_indptr: Tensor
    kv_lens: Tensor
    qo_indptr_host: Tensor | None
    kv_lens_host: Tensor | None
    tables: dict[bool, PageTable]
    mode: Any
    num_requests: int
    num_tokens: int
    window_slots: Tensor | None = None
    mask: PackedMask | None = None
    paths: list[Path] | None = None
    captures: bool = False
    planned: set[Kind] = field(default_factory=set)


class GraphBuffers:
    """Index arrays at addresses that captured graphs hold.

    SGLang lets its scheduler write the token table anew before a replayed graph has run, so that graphs read
    copies of the rows.
    """

    def __init__(self, *, requests: int, tokens: int, pages: int, pools: int, device: torch.device) -> None:
        self.requests, self.tokens = requests, tokens
        self.qo_indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self.pages = [torch.zeros(requests, pages, dtype=torch.int32, device=device) for _ in range(pools)]
        self.row_begin = torch.arange(requests, dtype=torch.int64, device=device) * pages
        self.row_end = self.row_begin + pages
        self.window_slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.captured = False


class StepArrays:
    """Makes steps of one engine.

    table: SGLang's int32 [rows, width]. translate: from slots to those of the windows' pool, or None.
    """

    def __init__(self, table: Tensor, page_size: int, translate: Callable[[Tensor], Tensor] | None) -> None:
        self._table = table
        self._page_size = page_size
        self._translate = translate
        self._on_device = table.is_cuda
        self._device_plans = env.DEVICE_PLAN not in env.without()
        self._uniform = lru_cache(maxsize=8)(self._make_uniform)

    def buffers(self, requests: int, tokens: int) -> GraphBuffers:
        """Allocate what the graphs of steps of this size read."""
        return GraphBuffers(
            requests=requests,
            tokens=tokens,
            pages=-(-self._table.shape[1] // self._page_size),
            pools=1 if self._translate is None else 2,
            device=self._table.device,
        )

    def step(self, forward_batch: Any, lengths: Lengths, buffers: GraphBuffers | None = None) -> Step:
        """Return a step; with `buffers` it is copied there."""
        requests = forward_batch.batch_size
        rows = forward_batch.req_pool_indices[:requests]
        kv_lens = self._kv_lens(forward_batch.seq_lens[:requests], lengths, buffers)
        qo_indptr = self._qo_indptr(requests, lengths, buffers)
        q_host, kv_host = self._host(forward_batch, lengths, qo_indptr, kv_lens)
        width = self._table.shape[1]
        longest = width if kv_host is None else min(int(kv_host.max()), width)
        tables = {}
        for windowed in (False,) if self._translate is None else (False, True):
            if buffers is not None:
                found = self._pages(rows, longest, windowed)
                own = buffers.pages[windowed]
                own[:requests, : found.shape[1]].copy_(found)
                begin, end = buffers.row_begin[:requests], buffers.row_end[:requests]
            elif windowed:
                # The pool of the sliding windows numbers its slots anew, so these rows alone are copied.
                own = self._pages(rows, longest, windowed).to(torch.int32)
                begin = torch.arange(requests, device=own.device) * own.shape[1]
                end = begin + own.shape[1]
            else:
                size = self._page_size
                tables[False] = PageTable.from_token_table(self._table, rows, kv_lens, page_size=size)
                continue
            tables[windowed] = PageTable(own, begin, end, kv_lens, self._page_size)
        padding = getattr(forward_batch, "num_padding", 0)
        return Step(
            qo_indptr,
            kv_lens,
            q_host,
            kv_host,
            tables,
            forward_batch.forward_mode,
            requests - padding,
            self._num_tokens(forward_batch, lengths, requests - padding),
        )

    def fill_window_slots(self, buffers: GraphBuffers, slots: Tensor) -> Tensor | None:
        """Translate the slots of a graph's tokens in place; padding is written to slot 0, as SGLang does."""
        if self._translate is None:
            return None
        tokens = slots.shape[0]
        buffers.window_slots[:tokens].copy_(self._translate(slots))
        buffers.window_slots[tokens:].zero_()
        return buffers.window_slots

    def window_slots(self, slots: Tensor) -> Tensor:
        """Return the slots of a step's tokens in the pool of the windows."""
        assert self._translate is not None, "only layers of a hybrid pool have windows of their own"
        return self._translate(slots).to(torch.int64)

    def _pages(self, rows: Tensor, tokens: int, windowed: bool) -> Tensor:
        """Copy the pages of the first `tokens` tokens of some rows: integers [requests, pages]."""
        size = self._page_size
        slots = self._table[:, :tokens:size].index_select(0, rows)
        if windowed and self._translate is not None:
            slots = self._translate(slots)
        return slots if size == 1 else slots.div(size, rounding_mode="floor")

    def _kv_lens(self, seq_lens: Tensor, lengths: Lengths, buffers: GraphBuffers | None) -> Tensor:
        if buffers is None:
            return (seq_lens + lengths.more_kv if lengths.more_kv else seq_lens).to(torch.int32)
        return torch.add(seq_lens, lengths.more_kv, out=buffers.kv_lens[: seq_lens.shape[0]])

    def _qo_indptr(self, requests: int, lengths: Lengths, buffers: GraphBuffers | None) -> Tensor:
        if lengths.width is not None:
            uniform = self._uniform(lengths.width, self._table.device)[: requests + 1]
            return uniform if buffers is None else buffers.qo_indptr[: requests + 1].copy_(uniform)
        assert lengths.q_lens is not None, "lengths that differ come with the step"
        if buffers is None and lengths.q_lens_host is not None and not self._on_device:
            return indptr(lengths.q_lens_host)
        starts = (
            torch.zeros(requests + 1, dtype=torch.int32, device=self._table.device)
            if buffers is None
            else buffers.qo_indptr[: requests + 1]
        )
        torch.cumsum(lengths.q_lens[:requests], 0, dtype=torch.int32, out=starts[1:])
        return starts

    def _host(
        self, forward_batch: Any, lengths: Lengths, qo_indptr: Tensor, kv_lens: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the host's (qo_indptr, kv_lens), or None for both where the device must plan."""
        if not self._on_device:
            return qo_indptr, kv_lens
        requests, known, q_lens = kv_lens.shape[0], forward_batch.seq_lens_cpu, lengths.q_lens_host
        if known is None or (lengths.width is None and (q_lens is None or len(q_lens) < requests)):
            if self._device_plans or not may_wait(kv_lens):
                return None, None
            return copy_lengths(qo_indptr, kv_lens)
        kv_host = (known[:requests] + lengths.more_kv).to(torch.int32)
        if lengths.width is not None:
            return self._uniform(lengths.width, torch.device("cpu"))[: requests + 1], kv_host
        assert q_lens is not None, "lengths that differ are known here"
        return indptr(q_lens[:requests]), kv_host

    def _num_tokens(self, forward_batch: Any, lengths: Lengths, requests: int) -> int:
        if lengths.width is not None:
            return requests * lengths.width
        if lengths.q_lens_host is not None:
            return sum(lengths.q_lens_host[:requests])
        slots = forward_batch.out_cache_loc
        return 0 if slots is None else int(slots.shape[0])

    def _make_uniform(self, width: int, device: torch.device) -> Tensor:
        """Starts of requests of `width` query tokens each, as many as the table has rows."""
        return torch.arange(self._table.shape[0] + 1, dtype=torch.int32, device=device) * width
