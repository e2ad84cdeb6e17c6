# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention patterns with arbitrary block sizes, as index arrays."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fi_backend.core.attention_checks import expect_tensor
from fi_backend.core.page_table import PageTable


def _expect_blocks(block_rows: int, block_cols: int) -> None:
    for name, value in (("block_rows", block_rows), ("block_cols", block_cols)):
        if value < 1:
            raise ValueError(f"{name}: expected >= 1; got {value}.")


@dataclass(frozen=True, slots=True, eq=False)
class BlockSparse:
    """A block-sparse matrix: which blocks of KV tokens each block of query tokens attends to.

    indptr: int32 [row blocks + 1]; indices: int32 [nnz], column blocks of each row block, ascending.
    num_rows, num_cols: query and KV tokens; block_rows (Br), block_cols (Bc): any size from 1. The last
    block of a dimension may be partial. Attention over it is unmasked inside the chosen blocks: use it with
    a spec of ``causal=False`` and ``page_size=block_cols``. BlockSparseAttention takes it too, and masks that
    change at every step, that differ between heads, or that are causal.
    """

    indptr: Tensor
    indices: Tensor
    num_rows: int
    num_cols: int
    block_rows: int
    block_cols: int

    @classmethod
    def from_mask(cls, mask: Tensor, *, block_rows: int, block_cols: int) -> BlockSparse:
        """Take the blocks of a dense mask that hold at least one True.

        mask: bool [query tokens, KV tokens]. Raises ValueError when a block is only partly True: a
        block-sparse matrix stores whole blocks; choose smaller blocks or a custom mask.
        """
        expect_tensor("mask", mask)
        if mask.dim() != 2 or mask.dtype is not torch.bool:
            raise TypeError(f"mask: expected bool [rows, cols]; got {mask.dtype} {tuple(mask.shape)}.")
        _expect_blocks(block_rows, block_cols)
        rows, cols = mask.shape
        row_blocks, col_blocks = -(-rows // block_rows), -(-cols // block_cols)
        shape = row_blocks * block_rows, col_blocks * block_cols
        padded = torch.zeros(shape, dtype=torch.bool, device=mask.device)
        padded[:rows, :cols] = mask
        inside = torch.zeros_like(padded)
        inside[:rows, :cols] = True

        def count(values: Tensor) -> Tensor:
            return values.view(row_blocks, block_rows, col_blocks, block_cols).sum((1, 3))

        some = count(padded)
        partly = (some > 0) & (some < count(inside))
        if bool(partly.any()):
            i, j = partly.nonzero()[0].tolist()
            raise ValueError(
                f"mask: expected whole {block_rows}x{block_cols} blocks; block ({i}, {j}) is only partly "
                "True. Choose smaller blocks, or pass the mask as custom_mask."
            )
        return cls.from_block_mask(
            some > 0, num_rows=rows, num_cols=cols, block_rows=block_rows, block_cols=block_cols
        )

    @classmethod
    def from_block_mask(
        cls, block_mask: Tensor, *, num_rows: int, num_cols: int, block_rows: int, block_cols: int
    ) -> BlockSparse:
        """Take the blocks whose bit is set.

        block_mask: bool [row blocks, column blocks]. On CUDA it waits for the device, which knows how many
        there are; BlockSparseAttention does not. Raises ValueError naming the argument.
        """
        _expect_blocks(block_rows, block_cols)
        shape = -(-num_rows // block_rows), -(-num_cols // block_cols)
        expect_tensor("block_mask", block_mask)
        if block_mask.dtype is not torch.bool or tuple(block_mask.shape) != shape:
            got = f"{block_mask.dtype} {tuple(block_mask.shape)}"
            raise ValueError(f"block_mask: expected bool {list(shape)}; got {got}.")
        indptr = torch.zeros(shape[0] + 1, dtype=torch.int32, device=block_mask.device)
        indptr[1:] = block_mask.sum(1).cumsum(0)
        indices = block_mask.nonzero()[:, 1].to(torch.int32)
        return cls(indptr, indices, num_rows, num_cols, block_rows, block_cols)

    @classmethod
    def from_sparse(cls, matrix: Tensor) -> BlockSparse:
        """Take the pattern of a sparse tensor of torch, whatever its values.

        matrix: [query tokens, KV tokens], of layout torch.sparse_bsr, whose blocks become blocks, or of
        torch.sparse_csr, whose blocks are single elements. Raises TypeError or ValueError.
        """
        if matrix.layout not in (torch.sparse_bsr, torch.sparse_csr) or matrix.dim() != 2:
            raise TypeError(
                "matrix: expected two dimensions of layout torch.sparse_bsr or torch.sparse_csr; got "
                f"{matrix.dim()} of {matrix.layout}. Convert it with .to_sparse_bsr(blocksize)."
            )
        block = matrix.values().shape[1:] if matrix.layout is torch.sparse_bsr else (1, 1)
        return cls.from_csr(
            matrix.crow_indices().to(torch.int32),
            matrix.col_indices().to(torch.int32),
            num_rows=matrix.shape[0],
            num_cols=matrix.shape[1],
            block_rows=block[0],
            block_cols=block[1],
        )

    @classmethod
    def from_csr(
        cls,
        indptr: Tensor,
        indices: Tensor,
        *,
        num_rows: int,
        num_cols: int,
        block_rows: int,
        block_cols: int,
    ) -> BlockSparse:
        """Take block-CSR arrays as they are (no copy).

        indptr: int32 [ceil(num_rows / block_rows) + 1]; indices: int32 [nnz], ascending inside a row.
        Raises ValueError when the arrays do not describe such a matrix.
        """
        _expect_blocks(block_rows, block_cols)
        row_blocks, col_blocks = -(-num_rows // block_rows), -(-num_cols // block_cols)
        for name, array in (("indptr", indptr), ("indices", indices)):
            expect_tensor(name, array)
            if array.dim() != 1:
                raise ValueError(f"{name}: expected one dimension; got shape {tuple(array.shape)}.")
        if indptr.dtype is not torch.int32 or indices.dtype is not torch.int32:
            raise TypeError(f"indptr, indices: expected int32; got {indptr.dtype}, {indices.dtype}.")
        if indptr.numel() != row_blocks + 1:
            raise ValueError(
                f"indptr: expected {row_blocks + 1} entries for {num_rows} rows; got {indptr.numel()}."
            )
        if indptr.device.type == "cpu":
            steps = indptr.diff()
            if bool((steps < 0).any()) or int(indptr[0]) != 0 or int(indptr[-1]) != indices.numel():
                raise ValueError(
                    f"indptr: expected a non-decreasing sequence from 0 to {indices.numel()}; "
                    f"got {indptr.tolist()}."
                )
            if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < col_blocks:
                raise ValueError(
                    f"indices: expected column blocks in 0..{col_blocks - 1}; got {indices.tolist()}."
                )
            rises = indices.diff() > 0
            inner = torch.ones(max(indices.numel() - 1, 0), dtype=torch.bool)
            starts = indptr[1:-1].long()
            inner[starts[(starts > 0) & (starts < indices.numel())] - 1] = False
            if bool((inner & ~rises).any()):
                raise ValueError(
                    "indices: expected ascending column blocks inside each row, without repeats."
                )
        return cls(indptr, indices, num_rows, num_cols, block_rows, block_cols)

    def to_block_mask(self) -> Tensor:
        """bool [row blocks, column blocks]: which blocks are chosen."""
        rows, cols = self.indptr.numel() - 1, -(-self.num_cols // self.block_cols)
        mask = torch.zeros(rows, cols, dtype=torch.bool, device=self.indptr.device)
        row = torch.arange(rows, device=mask.device).repeat_interleave(self.indptr.diff().long())
        mask[row, self.indices.long()] = True
        return mask

    @property
    def qo_indptr(self) -> Tensor:
        """int32 [row blocks + 1]: the query tokens of each row block."""
        count, device = self.indptr.numel(), self.indptr.device
        starts = torch.arange(count, dtype=torch.int32, device=device) * self.block_rows
        return starts.clamp_max(self.num_rows)

    def to_page_table(self) -> PageTable:
        """The same matrix as rows over pages of block_cols tokens; indices are shared, not copied."""
        counts = self.indptr.diff().long()
        kv_lens = counts * self.block_cols
        partial = self.num_cols % self.block_cols
        if partial and self.indices.numel():
            last = self.indices[(self.indptr[1:].long() - 1).clamp_min(0)]
            ends_partial = (counts > 0) & (last == self.num_cols // self.block_cols)
            kv_lens -= ends_partial * (self.block_cols - partial)
        return PageTable.from_csr(
            self.indptr, self.indices, page_size=self.block_cols, kv_lens=kv_lens.to(torch.int32)
        )
