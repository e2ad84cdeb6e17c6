# SPDX-License-Identifier: Apache-2.0
"""PageTable: index memory is the engine's own, whatever its strides; what cannot be a table is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual import virtual_zeros

from fi_backend.core import page_table
from fi_backend.core.page_table import PageTable


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pages(table: PageTable, request: int) -> list[int]:
    """Page ids of one request, read as csrc/core/params.h describes the addressing."""
    begin = int(table.row_begin[request])
    count = -(-int(table.kv_lens[request]) // table.page_size)
    if table.indices is None:
        return [begin + p for p in range(count)]
    memory = table.indices.as_strided((int(table.row_end.max()),), (1,), table.indices.storage_offset())
    assert begin + (count - 1) * table.index_step < int(table.row_end[request])
    return [int(memory[begin + p * table.index_step]) // table.index_divisor for p in range(count)]


def engine_table() -> torch.Tensor:
    return torch.arange(24, dtype=torch.int32).view(4, 6) * 10


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("whole", lambda t: t),
        ("first rows", lambda t: t[:2]),
        ("later rows", lambda t: t[1:3]),
        ("some columns", lambda t: t[:3, 1:4]),
        ("every second row", lambda t: t[::2]),
        ("one row", lambda t: t[3:4]),
        ("one row for all", lambda t: t[2].expand(3, 6)),
        ("one column", lambda t: t[:, :1]),
        ("no row", lambda t: t[:0]),
    ],
)
def test_block_tables_are_used_where_they_are(name: str, view: Any) -> None:
    engine = engine_table()
    block_table = view(engine)
    rows, width = block_table.shape
    kv_lens = torch.full((rows,), 8 * width - 3, dtype=torch.int32)
    table = PageTable.from_block_table(block_table, kv_lens, page_size=8)
    assert table.indices is not None
    assert table.indices.data_ptr() == block_table.data_ptr()
    assert table.kv_lens.data_ptr() == kv_lens.data_ptr()
    assert table.num_requests == rows
    assert (table.index_step, table.index_divisor, table.page_size) == (1, 1, 8)
    assert [pages(table, r) for r in range(rows)] == block_table.tolist()
    assert (table.row_end - table.row_begin).tolist() == [width] * rows
    # The engine rewrites its table between steps: what it writes is what is read.
    engine += 1
    assert [pages(table, r) for r in range(rows)] == block_table.tolist()


def test_a_table_without_columns_has_empty_rows() -> None:
    table = PageTable.from_block_table(torch.empty(3, 0, dtype=torch.int32), int32(0, 0, 0), page_size=16)
    assert table.row_begin.tolist() == table.row_end.tolist() == [0, 0, 0]


def test_row_starts_are_64_bit() -> None:
    wide = virtual_zeros(2**32 + 18, torch.int32).as_strided((3, 4), (2**31 + 7, 1))
    table = PageTable.from_block_table(wide, int32(1, 1, 1), page_size=16)
    assert table.row_begin.tolist() == [0, 2**31 + 7, 2**32 + 14]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("row_dtype", [torch.int32, torch.int64])
def test_token_tables_are_used_where_they_are(page_size: int, row_dtype: torch.dtype) -> None:
    page_ids = torch.tensor([[7, 2, 9], [1, 1, 0], [5, 4, 3], [8, 8, 8]], dtype=torch.int32)
    slots = (page_ids[:, :, None] * page_size + torch.arange(page_size, dtype=torch.int32)).flatten(1)
    rows = torch.tensor([3, 0, 2], dtype=row_dtype)
    kv_lens = torch.full((3,), 3 * page_size, dtype=torch.int32) - int(page_size > 1)
    table = PageTable.from_token_table(slots, rows, kv_lens, page_size=page_size)
    assert table.indices is not None
    assert table.indices.data_ptr() == slots.data_ptr()
    assert (table.index_step, table.index_divisor) == (page_size, page_size)
    assert [pages(table, r) for r in range(3)] == [[8, 8, 8], [7, 2, 9], [5, 4, 3]]
    padded = torch.zeros(5, 7 * page_size, dtype=torch.int32)
    padded[:4, : 3 * page_size] = slots
    view = PageTable.from_token_table(padded[:, : 3 * page_size], rows, kv_lens, page_size=page_size)
    assert [pages(view, r) for r in range(3)] == [[8, 8, 8], [7, 2, 9], [5, 4, 3]]
    assert view.row_begin.tolist() == [row * 7 * page_size for row in (3, 0, 2)]


@pytest.mark.parametrize("indptr_dtype", [torch.int32, torch.int64])
def test_csr_takes_the_last_page_or_the_lengths(indptr_dtype: torch.dtype) -> None:
    indptr = torch.tensor([0, 2, 2, 5], dtype=indptr_dtype)
    indices = int32(4, 0, 3, 3, 1)
    by_last = PageTable.from_csr(indptr, indices, page_size=16, last_page_len=int32(16, 0, 1))
    by_lens = PageTable.from_csr(indptr, indices, page_size=16, kv_lens=int32(32, 0, 33))
    for table in (by_last, by_lens):
        assert table.indices is not None
        assert table.indices.data_ptr() == indices.data_ptr()
        assert table.kv_lens.tolist() == [32, 0, 33]
        assert [pages(table, r) for r in range(3)] == [[4, 0], [], [3, 3, 1]]


def test_csr_with_a_page_too_many_keeps_the_stated_length() -> None:
    """An allocator that reserves the next page at a full one must not lengthen the context by a page."""
    table = PageTable.from_csr(int32(0, 3), int32(5, 6, 7), page_size=16, kv_lens=int32(32))
    assert table.kv_lens.tolist() == [32]
    assert pages(table, 0) == [5, 6]


@pytest.mark.parametrize("length", [17, 0, -1, 32, 2**31 - 1])
def test_t13_last_page_len_beyond_a_page_is_refused(length: int) -> None:
    """A last page said to hold more tokens than a page, or none, was taken by an engine without a word."""
    message = rf"^last_page_len\[1\]: expected 1\.\.16 .*got {length}\. It counts"
    with pytest.raises(ValueError, match=message):
        PageTable.from_csr(int32(0, 1, 3), int32(4, 5, 6), page_size=16, last_page_len=int32(16, length))
    # An empty row has no last page.
    with pytest.raises(ValueError, match=r"^last_page_len\[0\]: .*got -1|^last_page_len\[0\]: .*got 17"):
        PageTable.from_csr(int32(0, 0), int32(), page_size=16, last_page_len=int32(17 if length > 0 else -1))


def test_t13_neighbours_in_range_pass() -> None:
    for length in (1, 15, 16):
        table = PageTable.from_csr(int32(0, 2), int32(4, 5), page_size=16, last_page_len=int32(length))
        assert table.kv_lens.tolist() == [16 + length]


def test_ragged_rows_are_token_ranges() -> None:
    for dtype in (torch.int32, torch.int64):
        table = PageTable.ragged(torch.tensor([3, 5, 5, 9], dtype=dtype))
        assert table.indices is None
        assert table.kv_lens.tolist() == [2, 0, 4]
        assert [pages(table, r) for r in range(3)] == [[3, 4], [], [5, 6, 7, 8]]
    assert PageTable.ragged(torch.tensor([0])).num_requests == 0


GOOD_TABLE, ONE = engine_table(), int32(5)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "table dtype": (
        lambda: PageTable.from_block_table(GOOD_TABLE.long(), int32(1, 1, 1, 1), page_size=8),
        TypeError, r"^block_table: expected dtype torch\.int32; got torch\.int64",
    ),
    "table dimensions": (
        lambda: PageTable.from_block_table(GOOD_TABLE[0], ONE, page_size=8),
        ValueError, r"^block_table: expected 2 dimension.*got shape \(6,\)",
    ),
    "table no tensor": (
        lambda: PageTable.from_block_table([[1]], ONE, page_size=8),  # type: ignore[arg-type]
        TypeError, r"^block_table: expected a torch tensor; got list",
    ),
    "table columns": (
        lambda: PageTable.from_block_table(GOOD_TABLE[:, ::2], int32(1, 1, 1, 1), page_size=8),
        ValueError, r"^block_table: expected unit stride .*got \(6, 2\)",
    ),
    "table lengths": (
        lambda: PageTable.from_block_table(GOOD_TABLE, ONE, page_size=8),
        ValueError, r"^kv_lens: expected 4 entries.*got 1",
    ),
    "table lengths dtype": (
        lambda: PageTable.from_block_table(GOOD_TABLE[:1], ONE.long(), page_size=8),
        TypeError, r"^kv_lens: expected dtype torch\.int32; got torch\.int64",
    ),
    "table page size": (
        lambda: PageTable.from_block_table(GOOD_TABLE[:1], ONE, page_size=0),
        ValueError, r"^page_size: expected >= 1; got 0",
    ),
    "tokens rows": (
        lambda: PageTable.from_token_table(GOOD_TABLE, int32(1, 2), ONE, page_size=1),
        ValueError, r"^rows: expected shape \(1,\); got \(2,\)",
    ),
    "tokens rows dtype": (
        lambda: PageTable.from_token_table(GOOD_TABLE, torch.tensor([1.0]), ONE, page_size=1),
        TypeError, r"^rows: expected .*int.*got torch\.float32",
    ),
    "tokens rows behind": (
        lambda: PageTable.from_token_table(GOOD_TABLE, int32(0, 4), int32(5, 5), page_size=1),
        ValueError, r"^rows\[1\]: expected a row of the token table, 0\.\.3; got 4",
    ),
    # Such an offset is one of row 0 in 64 bits.
    "tokens rows beyond 64 bits": (
        lambda: PageTable.from_token_table(torch.zeros(2, 16).int(), torch.tensor([2**60]), ONE, page_size=1),
        ValueError, r"^rows\[0\]: .*got 1152921504606846976",
    ),
    "tokens rows before": (
        lambda: PageTable.from_token_table(GOOD_TABLE, torch.tensor([-1]), ONE, page_size=1),
        ValueError, r"^rows\[0\]: .*got -1",
    ),
    "tokens page size": (
        lambda: PageTable.from_token_table(GOOD_TABLE, ONE * 0, ONE, page_size=1.0),  # type: ignore[arg-type]
        TypeError, r"^page_size: expected an int; got 1\.0",
    ),
    # Rows are offsets in memory: every other entry would be read as if it were the next.
    "csr every other": (
        lambda: PageTable.from_csr(int32(0, 2), int32(1, 9, 2)[::2], page_size=8, kv_lens=int32(9)),
        ValueError, r"^indices: expected unit stride.*got 2",
    ),
    "tokens transposed": (
        lambda: PageTable.from_token_table(GOOD_TABLE.T, ONE, ONE, page_size=1),
        ValueError, r"^token_table: expected unit stride .*got \(1, 6\)",
    ),
    "csr decreasing": (
        lambda: PageTable.from_csr(int32(0, 2, 1), int32(1, 2), page_size=8, kv_lens=int32(9, 0)),
        ValueError, r"^indptr: expected a non-decreasing sequence; got \[0, 2, 1\]",
    ),
    "csr negative": (
        lambda: PageTable.from_csr(int32(-1, 1), int32(1, 2), page_size=8, kv_lens=int32(9)),
        ValueError, r"^indptr: expected bounds within 0\.\.2 indices; got -1\.\.1",
    ),
    "csr beyond": (
        lambda: PageTable.from_csr(int32(0, 3), int32(1, 2), page_size=8, kv_lens=int32(9)),
        ValueError, r"^indptr: expected bounds within 0\.\.2 indices; got 0\.\.3",
    ),
    "csr float": (
        lambda: PageTable.from_csr(torch.tensor([0.0, 1.0]), int32(1), page_size=8, kv_lens=int32(8)),
        TypeError, r"^indptr: expected .*int.*got torch\.float32",
    ),
    "csr empty": (
        lambda: PageTable.from_csr(int32(), int32(1), page_size=8, kv_lens=int32()),
        ValueError, r"^indptr: expected \[requests \+ 1\]; got \(0,\)",
    ),
    "csr neither": (
        lambda: PageTable.from_csr(int32(0, 1), int32(1), page_size=8),
        ValueError, r"^kv_lens: expected exactly one of kv_lens and last_page_len; got both or neither",
    ),
    "csr both": (
        lambda: PageTable.from_csr(int32(0, 1), ONE, page_size=8, kv_lens=ONE, last_page_len=ONE),
        ValueError, r"^kv_lens: expected exactly one",
    ),
    "csr too long": (
        lambda: PageTable.from_csr(int32(0, 1), int32(1), page_size=8, kv_lens=int32(9)),
        ValueError, r"^kv_lens\[0\]: expected at most 8.*got 9",
    ),
    "csr last page count": (
        lambda: PageTable.from_csr(int32(0, 1), int32(1), page_size=8, last_page_len=int32(8, 8)),
        ValueError, r"^last_page_len: expected 1 entries; got \(2,\)",
    ),
    "csr page size": (
        lambda: PageTable.from_csr(int32(0, 1), int32(1), page_size=-8, kv_lens=int32(8)),
        ValueError, r"^page_size: expected >= 1; got -8",
    ),
    "ragged decreasing": (
        lambda: PageTable.ragged(int32(0, 4, 2)),
        ValueError, r"^kv_indptr: expected a non-decreasing sequence.*got \[0, 4, 2\]",
    ),
    "ragged negative": (
        lambda: PageTable.ragged(int32(-1, 4)),
        ValueError, r"^kv_indptr: .*got \[-1, 4\]",
    ),
    "ragged beyond 32 bits": (
        lambda: PageTable.ragged(torch.tensor([0, 7, 2**32 + 12])),
        ValueError, r"^kv_indptr: expected at most 2147483647 KV tokens .*got 4294967301 in row 1",
    ),
    "csr beyond 32 bits": (
        lambda: PageTable.from_csr(int32(0, 5), int32(*range(5)), page_size=2**30, last_page_len=int32(5)),
        ValueError, r"^indptr: expected at most 2147483647 KV tokens .*got 4294967301 in row 0",
    ),
    "ragged float": (
        lambda: PageTable.ragged(torch.tensor([0.0, 1.0])),
        TypeError, r"^kv_indptr: expected .*int.*got torch\.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "kind", "message"), BAD.values(), ids=BAD)
def test_what_is_no_table_is_refused_by_name(build: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()


def test_row_bounds_on_a_device_are_kept() -> None:
    """Captured CUDA graphs hold their addresses: any number of other tables must not displace them."""
    tables = [
        PageTable.from_block_table(
            torch.zeros(3, width, dtype=torch.int32, device="meta"),
            torch.zeros(3, dtype=torch.int32, device="meta"),
            page_size=16,
        )
        for width in (7, *range(100, 1300), 7)
    ]
    assert tables[0].row_begin._base is tables[-1].row_begin._base
    assert tables[0].row_end._base is tables[-1].row_end._base


def test_row_bounds_are_not_made_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph would own them, and the first step outside it would read memory that nothing has written."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="Run the step once before capturing"):
        page_table._device_row_bounds(64, 11, 11, torch.device("cuda", 0))
