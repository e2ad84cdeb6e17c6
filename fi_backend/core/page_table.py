# SPDX-License-Identifier: Apache-2.0
"""Block-sparse rows over an engine's own index memory: block tables, token tables, CSR, contiguous KV.

Nothing is copied. Page p of request r is ``indices[row_begin[r] + p * index_step] // index_divisor``, or
``row_begin[r] + p`` without indices (contiguous KV).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


def _expect(condition: bool, name: str, expected: str, got: object, hint: str = "") -> None:
    if not condition:
        raise ValueError(f"{name}: expected {expected}; got {got}.{' ' + hint if hint else ''}")


def _expect_int(name: str, tensor: Tensor, dtype: torch.dtype, ndim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch tensor; got {type(tensor).__name__}.")
    if tensor.dtype is not dtype:
        raise TypeError(
            f"{name}: expected dtype {dtype}; got {tensor.dtype}. Convert it with .to({dtype}) once, "
            "outside the step loop."
        )
    _expect(tensor.dim() == ndim, name, f"{ndim} dimension(s)", f"shape {tuple(tensor.shape)}")


def _expect_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch tensor; got {type(tensor).__name__}.")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected torch.int32 or torch.int64; got {tensor.dtype}.")


@lru_cache(maxsize=64)
def _affine_rows(capacity: int, stride: int, offset: int, device: str) -> Tensor:
    return torch.arange(capacity, dtype=torch.int64, device=device) * stride + offset


def _rows(num_rows: int, stride: int, offset: int, device: torch.device) -> Tensor:
    """Row starts ``i * stride + offset``: made once per stride and sliced, so a step allocates nothing."""
    capacity = max(64, 1 << (num_rows - 1).bit_length()) if num_rows else 64
    return _affine_rows(capacity, stride, offset, str(device))[:num_rows]


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """Which pages each request's KV tokens lie in.

    indices: int32, any shape: the engine's own memory (None: contiguous KV).
    row_begin, row_end: int64 [requests]: offsets in elements from the start of `indices`; row_end is one
        past the last index that may be read.
    kv_lens: int32 [requests]: exact KV tokens, read when a kernel runs.
    page_size: tokens a page.
    index_step, index_divisor: page_size for a table of token slots, 1 for a table of pages.
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
        _expect_int("block_table", block_table, torch.int32, 2)
        _expect_int("kv_lens", kv_lens, torch.int32, 1)
        rows, width = block_table.shape
        _expect(kv_lens.shape[0] == rows, "kv_lens", f"{rows} entries, one a row", kv_lens.shape[0])
        _expect(page_size >= 1, "page_size", ">= 1", page_size)
        _expect(
            width <= 1 or block_table.stride(1) == 1,
            "block_table",
            "unit stride in its second dimension",
            block_table.stride(),
        )
        stride = block_table.stride(0) if rows > 1 else width
        begin = _rows(rows, stride, 0, block_table.device)
        return cls(block_table, begin, _rows(rows, stride, width, block_table.device), kv_lens, page_size)

    @classmethod
    def from_token_table(
        cls, token_table: Tensor, rows: Tensor, kv_lens: Tensor, *, page_size: int
    ) -> PageTable:
        """View rows of a table of token slots (SGLang's req_to_token) as block-sparse rows, without a copy.

        token_table: int32 [slots, width]: the KV slot of every token; slot // page_size is its page, and the
            slots of one page are consecutive.
        rows: integer [requests]: the table row of each request. kv_lens: int32 [requests].
        """
        _expect_int("token_table", token_table, torch.int32, 2)
        _expect_int("kv_lens", kv_lens, torch.int32, 1)
        _expect_integers("rows", rows)
        _expect(rows.shape == kv_lens.shape, "rows", f"shape {tuple(kv_lens.shape)}", tuple(rows.shape))
        _expect(page_size >= 1, "page_size", ">= 1", page_size)
        width = token_table.shape[1]
        _expect(
            width <= 1 or token_table.stride(1) == 1,
            "token_table",
            "unit stride in its second dimension",
            token_table.stride(),
        )
        begin = rows.to(torch.int64) * token_table.stride(0)
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
        _expect_int("indices", indices, torch.int32, 1)
        _expect_integers("indptr", indptr)
        _expect(indptr.dim() == 1 and indptr.numel() >= 1, "indptr", "[requests + 1]", tuple(indptr.shape))
        _expect(page_size >= 1, "page_size", ">= 1", page_size)
        if (last_page_len is None) == (kv_lens is None):
            raise ValueError(
                "kv_lens: expected exactly one of kv_lens and last_page_len; got both or neither."
            )
        begin64 = indptr.to(torch.int64)
        begin, end = begin64[:-1], begin64[1:]
        pages = end - begin
        host = indptr.device.type == "cpu"
        if host:
            _expect(bool((pages >= 0).all()), "indptr", "a non-decreasing sequence", indptr.tolist())
            ends_ok = indptr.numel() == 1 or (int(begin64[-1]) <= indices.numel() and int(begin64[0]) >= 0)
            _expect(ends_ok, "indptr", f"bounds within 0..{indices.numel()} indices", int(begin64[-1]))
        if kv_lens is None:
            assert last_page_len is not None
            _expect_int("last_page_len", last_page_len, torch.int32, 1)
            _expect(
                last_page_len.shape == begin.shape,
                "last_page_len",
                f"{begin.numel()} entries",
                tuple(last_page_len.shape),
            )
            if host:
                low = (pages > 0).to(torch.int32)
                bad = ((last_page_len < low) | (last_page_len > page_size)).nonzero()
                if bad.numel():
                    row = int(bad[0])
                    raise ValueError(
                        f"last_page_len[{row}]: expected 1..{page_size} (0 for an empty row); got "
                        f"{int(last_page_len[row])}. It counts the tokens in the row's last page."
                    )
            kv_lens = torch.where(
                pages > 0, (pages - 1) * page_size + last_page_len, torch.zeros_like(pages)
            ).to(torch.int32)
        _expect_int("kv_lens", kv_lens, torch.int32, 1)
        _expect(kv_lens.shape == begin.shape, "kv_lens", f"{begin.numel()} entries", tuple(kv_lens.shape))
        if host and kv_lens.device.type == "cpu":
            over = (kv_lens > pages * page_size).nonzero()
            if over.numel():
                row = int(over[0])
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
        _expect(
            kv_indptr.dim() == 1 and kv_indptr.numel() >= 1,
            "kv_indptr",
            "[requests + 1]",
            tuple(kv_indptr.shape),
        )
        bounds = kv_indptr.to(torch.int64)
        lens = (bounds[1:] - bounds[:-1]).to(torch.int32)
        if kv_indptr.device.type == "cpu":
            rises = bool((lens >= 0).all()) and int(bounds[0]) >= 0
            _expect(rises, "kv_indptr", "a non-decreasing sequence from 0 or more", kv_indptr.tolist())
        return cls(None, bounds[:-1], bounds[1:], lens, 1)
