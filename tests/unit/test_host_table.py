# SPDX-License-Identifier: Apache-2.0
"""Pages of a step on the host: of every form of table the same, and nothing read behind a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fi_backend.adapters.host_plan import copy_forest, copy_lengths
from fi_backend.core.attention import BatchAttention
from fi_backend.core.host_table import pages_on_host
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec

ROWS = ([7, 3, 9], [7, 5], [])
KV_LENS = torch.tensor([10, 6, 0], dtype=torch.int32)


def block_table() -> PageTable:
    wide = torch.full((3, 8), -77, dtype=torch.int32)
    for to, row in zip(wide, ROWS, strict=True):
        to[1 : 1 + len(row)] = torch.tensor(row, dtype=torch.int32)
    return PageTable.from_block_table(wide[:, 1:5], KV_LENS, page_size=4)


def token_table() -> PageTable:
    slots = torch.full((5, 16), -77, dtype=torch.int32)
    for at, row in zip((4, 1, 2), ROWS, strict=True):
        for index, page in enumerate(row):
            slots[at, 4 * index : 4 * index + 4] = 4 * page + torch.arange(4, dtype=torch.int32)
    return PageTable.from_token_table(slots, torch.tensor([4, 1, 2]), KV_LENS, page_size=4)


def csr() -> PageTable:
    indices = torch.tensor([7, 3, 9, 7, 5], dtype=torch.int32)
    return PageTable.from_csr(torch.tensor([0, 3, 5, 5]), indices, page_size=4, kv_lens=KV_LENS)


def rows(pages: Tensor | None) -> list[list[int]]:
    assert pages is not None
    return [row[:count].tolist() for row, count in zip(pages, (3, 2, 0), strict=True)]


@pytest.mark.parametrize("make", [block_table, token_table, csr])
def test_tables_of_any_form(make: object) -> None:
    pages = pages_on_host(make(), KV_LENS)  # type: ignore[operator]
    assert pages is not None
    assert (pages.shape, pages.dtype) == ((3, 3), torch.int32)
    assert rows(pages) == list(ROWS)


def test_contiguous_kv_has_no_pages() -> None:
    assert pages_on_host(PageTable.ragged(torch.tensor([0, 5])), torch.tensor([5], dtype=torch.int32)) is None


def test_nothing_is_read_behind_a_row() -> None:
    """Lengths that do not fit, as while an engine changes them, and memory that ends where the rows do."""
    too_long = torch.tensor([100, 7, 100], dtype=torch.int32)
    pages = pages_on_host(csr(), too_long)
    assert pages is not None
    assert pages.shape == (3, 25)
    assert pages[0].tolist() == [7, 3] + [9] * 23
    assert pages[1, :2].tolist() == [7, 5]
    empty = PageTable.from_block_table(torch.empty(2, 0, dtype=torch.int32), too_long[:2], page_size=4)
    assert pages_on_host(empty, too_long[:2]).shape == (2, 0)  # type: ignore[union-attr]
    none = PageTable.from_block_table(torch.empty(0, 3, dtype=torch.int32), too_long[:0], page_size=4)
    assert pages_on_host(none, too_long[:0]).shape == (0, 0)  # type: ignore[union-attr]


def test_as_many_requests_are_searched_as_on_a_device() -> None:
    kv_lens = torch.full((1030,), 9, dtype=torch.int32)
    table = PageTable.from_block_table(torch.ones(1030, 3, dtype=torch.int32), kv_lens, page_size=4)
    attention = BatchAttention(
        AttentionSpec(4, 2, 32, page_size=4), max_requests=2, max_tokens=2, max_kv_len=9
    )
    forest = copy_forest(attention, table, copy_lengths(torch.arange(1031, dtype=torch.int32), kv_lens))
    assert forest is not None
    assert forest.nodes.tolist() == [[-1, 0, 8, 0, 1024]]
