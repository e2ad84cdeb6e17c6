# SPDX-License-Identifier: Apache-2.0
"""Block-sparse rows over an engine's own index memory: block tables, token tables, CSR, contiguous KV.

Nothing is copied. Page p of request r is ``indices[row_begin[r] + p * index_step] // index_divisor``, or
``row_begin[r] + p`` without indices (contiguous KV).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from fi_backend.core.index_arrays import (
    as_dtype,
    expect_alike,
    expect_array,
    expect_dtype,
    first_true,
    is_torch,
    on_host,
    size_of,
    strides_of,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MAX_TOKENS = 2**31 - 1


def _wrong(name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected}; got {got}.")


def _expect_int32(name: str, array: Tensor, ndim: int) -> None:
    expect_array(name, array)
    expect_dtype(name, array, "int32")
    if array.ndim != ndim:
        raise _wrong(name, f"{ndim} dimension(s)", f"shape {tuple(array.shape)}")


def _expect_page_size(page_size: int) -> None:
    if not isinstance(page_size, Integral):
        raise TypeError(f"page_size: expected an int; got {page_size!r}.")
    if page_size < 1:
        raise _wrong("page_size", ">= 1", page_size)


def _row_stride(name: str, table: Tensor) -> int:
    strides = strides_of(table)
    if table.shape[0] > 0 and table.shape[1] > 1 and strides[1] != 1:  # NumPy's are 0 without elements
        raise _wrong(name, "unit stride in its second dimension", strides)
    if strides[0] < 0:
        raise _wrong(name, "a stride of 0 or more between its rows", strides)
    return strides[0]


def _expect_integers(name: str, array: Tensor) -> None:
    expect_array(name, array)
    expect_dtype(name, array, "int32", "int64")


def _expect_starts(name: str, starts: Tensor) -> None:
    if starts.ndim != 1 or size_of(starts) < 1:
        raise _wrong(name, "[requests + 1]", tuple(starts.shape))


def _expect_lengths(name: str, lens: Tensor) -> None:
    """int64 lengths that are about to become int32."""
    row = first_true(lens > _MAX_TOKENS)
    if row is not None:
        raise _wrong(name, f"at most {_MAX_TOKENS} KV tokens a request", f"{int(lens[row])} in row {row}")


@lru_cache(maxsize=512)
def _host_bounds(num_rows: int, stride: int, width: int) -> tuple[Any, Any]:
    begin = np.arange(num_rows, dtype=np.int64) * stride
    return begin, begin + width


@lru_cache(maxsize=512)
def _host_row_bounds(num_rows: int, stride: int, width: int) -> tuple[Tensor, Tensor]:
    import torch

    begin, end = _host_bounds(num_rows, stride, width)
    return torch.from_numpy(begin), torch.from_numpy(end)


@cache  # never dropped: captured CUDA graphs hold these addresses
def _device_row_bounds(capacity: int, stride: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "from_block_table: expected a block table of this shape to have been seen before a graph is "
            "captured; got its first one during the capture. Run the step once before capturing it."
        )
    begin = torch.arange(capacity, dtype=torch.int64, device=device) * stride
    return begin, begin + width


def _row_bounds(num_rows: int, stride: int, width: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Starts ``i * stride`` and ends ``i * stride + width``: made once, so that a step allocates nothing."""
    if not is_torch(table):
        return _host_bounds(num_rows, stride, width)
    if table.device.type == "cpu":
        return _host_row_bounds(num_rows, stride, width)
    begin, end = _device_row_bounds(1 << max(8, num_rows.bit_length()), stride, width, table.device)
    return begin[:num_rows], end[:num_rows]


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Which pages each request's KV tokens lie in.

    indices: int32, any shape: the engine's own memory (None: contiguous KV).
    row_begin, row_end: int64 [requests]: offsets in elements from the start of `indices`; row_end is one
        past the last index that may be read.
    kv_lens: int32 [requests]: exact KV tokens, read when a kernel runs.
    page_size: tokens a page.
    index_step, index_divisor: page_size for a table of token slots, 1 for a table of pages.

    A captured CUDA graph reads these tensors where they lay at the capture. from_block_table() keeps them in
    place from step to step; the other makers compute some of them anew, so that a graph needs the table of
    its capture kept, and its tensors filled in place.
    """

    indices: Tensor | None
    row_begin: Tensor
    row_end: Tensor
    kv_lens: Tensor
    page_size: int
    index_step: int = 1
    index_divisor: int = 1

    @property
    def num_requests(self) -> int:
        """Number of row groups."""
        return self.kv_lens.shape[0]

    @classmethod
    def from_block_table(cls, block_table: Tensor, kv_lens: Tensor, *, page_size: int) -> PageTable:
        """View a padded block table as block-sparse rows, without a copy.

        block_table: int32 [requests, width], page ids, unit column stride, any row stride; entries past
            ceil(kv_len / page_size) are never read.
        kv_lens: int32 [requests]. Raises ValueError or TypeError naming the argument.
        """
        _expect_int32("block_table", block_table, 2)
        _expect_int32("kv_lens", kv_lens, 1)
        expect_alike("kv_lens", kv_lens, "block_table", block_table)
        rows, width = block_table.shape
        if kv_lens.shape[0] != rows:
            raise _wrong("kv_lens", f"{rows} entries, one a row", kv_lens.shape[0])
        _expect_page_size(page_size)
        row_stride = _row_stride("block_table", block_table)
        # The stride of a single row, or of rows without entries, is arbitrary.
        stride = row_stride if rows > 1 and width else width
        begin, end = _row_bounds(rows, stride, width, block_table)
        return cls(block_table, begin, end, kv_lens, page_size)

    @classmethod
    def from_token_table(
        cls, token_table: Tensor, rows: Tensor, kv_lens: Tensor, *, page_size: int
    ) -> PageTable:
        """View rows of a table of token slots (SGLang's req_to_token) as block-sparse rows, without a copy.

        token_table: int32 [slots, width]: the KV slot of every token; slot // page_size is its page, and the
            slots of one page are consecutive.
        rows: integer [requests]: the table row of each request; checked on the host. kv_lens: int32
            [requests]. Raises ValueError or TypeError naming the argument.
        """
        _expect_int32("token_table", token_table, 2)
        _expect_int32("kv_lens", kv_lens, 1)
        _expect_integers("rows", rows)
        for name, array in (("rows", rows), ("kv_lens", kv_lens)):
            expect_alike(name, array, "token_table", token_table)
        if rows.shape != kv_lens.shape:
            raise _wrong("rows", f"shape {tuple(kv_lens.shape)}", tuple(rows.shape))
        _expect_page_size(page_size)
        row_stride = _row_stride("token_table", token_table)
        slots, width = token_table.shape
        if on_host(rows) and (at := first_true((rows < 0) | (rows >= slots))) is not None:
            raise _wrong(f"rows[{at}]", f"a row of the token table, 0..{slots - 1}", int(rows[at]))
        begin = as_dtype(rows, "int64") * row_stride
        return cls(token_table, begin, begin + width, kv_lens, page_size, page_size, page_size)

    @classmethod
    def from_csr(
        cls,
        indptr: Tensor,
        indices: Tensor,
        *,
        page_size: int,
        last_page_len: Tensor | None = None,
        kv_lens: Tensor | None = None,
    ) -> PageTable:
        """Build rows from a running indptr; exactly one of last_page_len and kv_lens states the lengths.

        indptr: int32 or int64 [requests + 1]; indices: int32 [pages]; last_page_len, kv_lens: int32
            [requests]. Host arrays are checked: indptr must not decrease, last_page_len must lie in
            1..page_size (0 for an empty row), kv_lens must fit into the row's pages.
        """
        _expect_int32("indices", indices, 1)
        if indices.shape[0] > 1 and strides_of(indices)[0] != 1:
            raise _wrong("indices", "unit stride, since rows are offsets in memory", strides_of(indices)[0])
        _expect_integers("indptr", indptr)
        expect_alike("indptr", indptr, "indices", indices)
        _expect_starts("indptr", indptr)
        _expect_page_size(page_size)
        if (last_page_len is None) == (kv_lens is None):
            raise ValueError(
                "kv_lens: expected exactly one of kv_lens and last_page_len; got both or neither."
            )
        begin64 = as_dtype(indptr, "int64")
        begin, end = begin64[:-1], begin64[1:]
        pages = end - begin
        host = on_host(indptr)
        if host:
            if not bool((pages >= 0).all()):
                raise _wrong("indptr", "a non-decreasing sequence", indptr.tolist())
            available = size_of(indices)
            if size_of(indptr) > 1 and not 0 <= int(begin64[0]) <= int(begin64[-1]) <= available:
                raise _wrong(
                    "indptr",
                    f"bounds within 0..{available} indices",
                    f"{int(begin64[0])}..{int(begin64[-1])}",
                )
        if kv_lens is None:
            assert last_page_len is not None
            _expect_int32("last_page_len", last_page_len, 1)
            expect_alike("last_page_len", last_page_len, "indptr", indptr)
            if last_page_len.shape != begin.shape:
                raise _wrong("last_page_len", f"{size_of(begin)} entries", tuple(last_page_len.shape))
            if host:
                low = as_dtype(pages > 0, "int32")
                row = first_true((last_page_len < low) | (last_page_len > page_size))
                if row is not None:
                    raise ValueError(
                        f"last_page_len[{row}]: expected 1..{page_size} (0 for an empty row); got "
                        f"{int(last_page_len[row])}. It counts the tokens in the row's last page."
                    )
            lens = ((pages - 1) * page_size + last_page_len) * (pages > 0)
            if host:
                _expect_lengths("indptr", lens)
            kv_lens = as_dtype(lens, "int32")
        _expect_int32("kv_lens", kv_lens, 1)
        expect_alike("kv_lens", kv_lens, "indptr", indptr)
        if kv_lens.shape != begin.shape:
            raise _wrong("kv_lens", f"{size_of(begin)} entries", tuple(kv_lens.shape))
        if host and on_host(kv_lens):
            row = first_true(kv_lens > pages * page_size)
            if row is not None:
                raise ValueError(
                    f"kv_lens[{row}]: expected at most {int(pages[row]) * page_size} tokens, which the row's "
                    f"{int(pages[row])} pages hold; got {int(kv_lens[row])}."
                )
        return cls(indices, begin, end, kv_lens, page_size)

    @classmethod
    def ragged(cls, kv_indptr: Tensor) -> PageTable:
        """Contiguous KV: the tokens of request r are rows kv_indptr[r] .. kv_indptr[r + 1] of K and V.

        kv_indptr: int32 or int64 [requests + 1].
        """
        _expect_integers("kv_indptr", kv_indptr)
        _expect_starts("kv_indptr", kv_indptr)
        bounds = as_dtype(kv_indptr, "int64")
        lens = bounds[1:] - bounds[:-1]
        if on_host(kv_indptr):
            if not bool((lens >= 0).all()) or int(bounds[0]) < 0:
                raise _wrong("kv_indptr", "a non-decreasing sequence from 0 or more", kv_indptr.tolist())
            _expect_lengths("kv_indptr", lens)
        return cls(None, bounds[:-1], bounds[1:], as_dtype(lens, "int32"), 1)
