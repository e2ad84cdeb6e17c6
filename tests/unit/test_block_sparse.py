# SPDX-License-Identifier: Apache-2.0
"""BlockSparse: any block size, from a mask or from CSR, to rows of pages and back to the same mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st

from fi_backend.core.block_sparse import BlockSparse


@st.composite
def matrices(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A mask made of whole blocks; the last row and the last column of blocks may be partial."""
    block_rows, block_cols = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    rows, cols = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    shape = -(-rows // block_rows), -(-cols // block_cols)
    chosen = torch.tensor(
        draw(st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    )
    mask = chosen.view(shape).repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)
    return mask[:rows, :cols], block_rows, block_cols


def to_mask(matrix: BlockSparse) -> torch.Tensor:
    """What attention over its pages sees: request r reads kv_lens[r] tokens."""
    table, qo_indptr = matrix.to_page_table(), matrix.qo_indptr.tolist()
    mask = torch.zeros(matrix.num_rows, matrix.num_cols, dtype=torch.bool)
    for block in range(table.num_requests):
        page_ids = matrix.indices[int(table.row_begin[block]) : int(table.row_end[block])].tolist()
        for token in range(int(table.kv_lens[block])):
            column = page_ids[token // table.page_size] * table.page_size + token % table.page_size
            mask[qo_indptr[block] : qo_indptr[block + 1], column] = True
    return mask


@share(200)
@given(matrices())
def test_a_mask_of_whole_blocks_survives(case: tuple[torch.Tensor, int, int]) -> None:
    mask, block_rows, block_cols = case
    matrix = BlockSparse.from_mask(mask, block_rows=block_rows, block_cols=block_cols)
    assert torch.equal(to_mask(matrix), mask)
    again = BlockSparse.from_csr(
        matrix.indptr,
        matrix.indices,
        num_rows=matrix.num_rows,
        num_cols=matrix.num_cols,
        block_rows=block_rows,
        block_cols=block_cols,
    )
    assert torch.equal(to_mask(again), mask)


def test_indices_are_shared_from_csr_to_the_page_table() -> None:
    indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    matrix = BlockSparse.from_csr(indptr, indices, num_rows=5, num_cols=20, block_rows=3, block_cols=8)
    table = matrix.to_page_table()
    assert table.indices is not None
    assert table.indices.data_ptr() == indices.data_ptr()
    assert table.page_size == 8
    assert table.kv_lens.tolist() == [4, 16]  # block 2 holds the last 4 of 20 columns
    assert matrix.qo_indptr.tolist() == [0, 3, 5]


def from_csr(indptr: list[int], indices: list[int], **sizes: int) -> BlockSparse:
    shape = {"num_rows": 4, "num_cols": 24, "block_rows": 2, "block_cols": 8} | sizes
    return BlockSparse.from_csr(
        torch.tensor(indptr, dtype=torch.int32), torch.tensor(indices, dtype=torch.int32), **shape
    )


HALF = torch.tensor([[True, False], [True, True]])
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "partly true": (
        lambda: BlockSparse.from_mask(HALF, block_rows=2, block_cols=2),
        ValueError, r"^mask: expected whole 2x2 blocks; block \(0, 0\) is only partly True",
    ),
    "mask dtype": (
        lambda: BlockSparse.from_mask(HALF.int(), block_rows=1, block_cols=1),
        TypeError, r"^mask: expected bool .*got torch\.int32",
    ),
    "mask shape": (
        lambda: BlockSparse.from_mask(HALF[0], block_rows=1, block_cols=1),
        TypeError, r"^mask: expected bool \[rows, cols\]; got .*\(2,\)",
    ),
    "mask block": (
        lambda: BlockSparse.from_mask(HALF, block_rows=0, block_cols=1),
        ValueError, r"^block_rows: expected >= 1; got 0",
    ),
    "block": (lambda: from_csr([0], [], block_cols=-1), ValueError, r"^block_cols: expected >= 1; got -1"),
    "rows": (lambda: from_csr([0, 0], []), ValueError, r"^indptr: expected 3 entries for 4 rows; got 2"),
    "decreasing": (lambda: from_csr([0, 2, 1], [0]), ValueError, r"^indptr: .*non-decr.*got \[0, 2, 1\]"),
    "start": (lambda: from_csr([1, 1, 1], [0]), ValueError, r"^indptr: .* from 0 to 1; got \[1, 1, 1\]"),
    "end": (lambda: from_csr([0, 1, 2], [0]), ValueError, r"^indptr: .* from 0 to 1; got \[0, 1, 2\]"),
    "column": (lambda: from_csr([0, 1, 2], [0, 3]), ValueError, r"^indices: .* in 0\.\.2; got \[0, 3\]"),
    "negative column": (lambda: from_csr([0, 1, 2], [0, -1]), ValueError, r"^indices: .*got \[0, -1\]"),
    "unsorted": (lambda: from_csr([0, 2, 2], [1, 0]), ValueError, r"^indices: expected ascending"),
    "repeat": (lambda: from_csr([0, 1, 3], [0, 2, 2]), ValueError, r"^indices: expected ascending"),
    "lists": (
        lambda: BlockSparse.from_csr(
            [0, 1], [0], num_rows=1, num_cols=1, block_rows=1, block_cols=1  # type: ignore[arg-type]
        ),
        TypeError, r"^indptr: expected a torch tensor; got list",
    ),
    "dimensions": (
        lambda: BlockSparse.from_csr(
            torch.zeros(1, 2).int(), torch.zeros(0).int(), num_rows=1, num_cols=1, block_rows=1, block_cols=1
        ),
        ValueError, r"^indptr: expected one dimension; got shape \(1, 2\)",
    ),
    "dtype": (
        lambda: BlockSparse.from_csr(
            torch.tensor([0, 0]), torch.tensor([]), num_rows=1, num_cols=1, block_rows=1, block_cols=1
        ),
        TypeError, r"^indptr, indices: expected int32; got torch\.int64, torch\.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "kind", "message"), BAD.values(), ids=BAD)
def test_what_is_no_matrix_is_refused_by_name(build: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()


def test_descents_between_rows_are_not_descents_inside_one() -> None:
    matrix = from_csr([0, 2, 3], [1, 2, 0])
    assert to_mask(matrix).int().sum(1).tolist() == [16, 16, 8, 8]
    empty_rows = from_csr([0, 0, 1, 1, 2], [2, 0], num_rows=8)
    assert to_mask(empty_rows).int().sum(1).tolist() == [0, 0, 8, 8, 0, 0, 8, 8]
