# SPDX-License-Identifier: Apache-2.0
"""Page tables of arrays of any library: lengths and starts in host memory, tables where the caches lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from fi_backend.arrays.library import Array, device_of, expect_array
from fi_backend.arrays.view import host_view, view
from fi_backend.core.index_arrays import expect_dtype
from fi_backend.core.page_table import PageTable as CorePageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class PageTable(CorePageTable):
    """Which pages each request's KV tokens lie in, for fi_backend.arrays.BatchAttention.

    As fi_backend.PageTable, made of arrays of any library. Nothing is copied: what is later written into
    writable arrays is seen by the next run() on a CPU. Tables of pages lie where the caches do; lengths,
    starts and rows lie in host memory, and on CUDA plan() uploads them.

    source: the array that `indices` is a view of.
    """

    source: Any = None

    @classmethod
    def from_block_table(cls, block_table: Array, kv_lens: Array, *, page_size: int) -> PageTable:
        """View a padded block table as block-sparse rows.

        block_table: int32 [requests, width], page ids, unit column stride, any row stride; entries past
            ceil(kv_len / page_size) are never read.
        kv_lens: int32 [requests]. Raises ValueError or TypeError naming the argument.
        """
        lens = _host("kv_lens", kv_lens)
        pages = _table("block_table", block_table)
        return _made(super(PageTable, cls).from_block_table(pages, lens, page_size=page_size), block_table)

    @classmethod
    def from_token_table(
        cls, token_table: Array, rows: Array, kv_lens: Array, *, page_size: int
    ) -> PageTable:
        """View rows of a table of token slots as block-sparse rows.

        token_table: int32 [slots, width]: the KV slot of every token; slot // page_size is its page, and the
            slots of one page are consecutive.
        rows: int32 or int64 [requests]: the table row of each request. kv_lens: int32 [requests].
        """
        lens, chosen = _host("kv_lens", kv_lens), _host("rows", rows)
        slots = _table("token_table", token_table)
        made = super(PageTable, cls).from_token_table(slots, chosen, lens, page_size=page_size)
        return _made(made, token_table)

    @classmethod
    def from_csr(
        cls,
        indptr: Array,
        indices: Array,
        *,
        page_size: int,
        last_page_len: Array | None = None,
        kv_lens: Array | None = None,
    ) -> PageTable:
        """Build rows from a running indptr; exactly one of last_page_len and kv_lens states the lengths.

        indptr: int32 or int64 [requests + 1]; indices: int32 [pages]; last_page_len, kv_lens: int32
            [requests]. indptr must not decrease, last_page_len must lie in 1..page_size (0 for an empty row),
            kv_lens must fit into the row's pages. Raises ValueError or TypeError naming the argument.
        """
        made = super(PageTable, cls).from_csr(
            _host("indptr", indptr),
            _table("indices", indices),
            page_size=page_size,
            last_page_len=None if last_page_len is None else _host("last_page_len", last_page_len),
            kv_lens=None if kv_lens is None else _host("kv_lens", kv_lens),
        )
        return _made(made, indices)

    @classmethod
    def ragged(cls, kv_indptr: Array) -> PageTable:
        """Contiguous KV: the tokens of request r are rows kv_indptr[r] .. kv_indptr[r + 1] of K and V.

        kv_indptr: int32 or int64 [requests + 1].
        """
        return _made(super(PageTable, cls).ragged(_host("kv_indptr", kv_indptr)), None)


def expect_table(spec: AttentionSpec, device: str, starts: Any, table: object) -> None:
    """Check that query starts of the host and a page table are of one batch, of the spec and the device."""
    if not isinstance(table, PageTable):
        got = f"{type(table).__module__}.{type(table).__name__}"
        raise TypeError(f"page_table: expected a PageTable of fi_backend.arrays; got {got}.")
    expect_dtype("qo_indptr", starts, "int32")
    if starts.shape != (table.num_requests + 1,):
        raise PlanError(
            f"qo_indptr: expected {table.num_requests + 1} entries, one more than the page table has "
            f"requests; got shape {starts.shape}."
        )
    expected = 1 if table.indices is None else spec.page_size
    if table.page_size != expected:
        raise PlanError(f"page_table: expected page_size {expected}, the spec's; got {table.page_size}.")
    if table.source is not None and (lies := device_of("page_table", table.source)) != device:
        raise PlanError(f"page_table: expected pages on {device}; got them on {lies}.")


def _made(table: CorePageTable, source: Array | None) -> PageTable:
    return replace(cast(PageTable, table), source=source)


def _host(name: str, array: Array) -> Any:
    return host_view(name, array)


def _table(name: str, array: Array) -> Any:
    """A table in host memory as NumPy's, one on a device as a view of it."""
    expect_array(name, array)
    return host_view(name, array) if device_of(name, array) == "cpu" else view(name, array)
