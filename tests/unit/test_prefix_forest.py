# SPDX-License-Identifier: Apache-2.0
"""The prefix forest from page tables, token tables and radix paths, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from examples import share
from forest_cases import SharedBatch, assert_is, batches
from hypothesis import example, given
from hypothesis import strategies as st

from fi_backend.core.page_table import PageTable
from fi_backend.core.prefix_forest import PrefixForest, shareable


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def from_block_table(batch: SharedBatch) -> PrefixForest:
    return PrefixForest.from_block_table(
        batch.block_table(), batch.shareable, batch.page_size, max_depth=batch.max_depth
    )


LADDER = SharedBatch(tuple(tuple(range(n)) for n in range(1, 13)), tuple(range(1, 13)))


@share(300)
@given(batches())
@example(LADDER)
@example(replace(LADDER, rows=LADDER.rows[::-1], pages=LADDER.pages[::-1]))
@example(SharedBatch((), ()))
@example(SharedBatch(((1, 2), (1, 2)), (0, 2)))
def test_block_table(batch: SharedBatch) -> None:
    assert_is(from_block_table(batch), batch)


@share(100)
@given(batches(max_pages=100, long_run=300))
def test_long_rows(batch: SharedBatch) -> None:
    assert_is(from_block_table(batch), batch)


@share(100)
@given(batches())
def test_token_table(batch: SharedBatch) -> None:
    table, rows = batch.token_table()
    forest = PrefixForest.from_token_table(
        table, rows, batch.shareable, batch.page_size, max_depth=batch.max_depth
    )
    assert_is(forest, batch)


@share(100)
@given(batches(), st.integers(1, 5))
def test_radix_paths(batch: SharedBatch, cut: int) -> None:
    forest = PrefixForest.from_paths(batch.paths(cut), batch.shareable, max_depth=batch.max_depth)
    assert_is(forest, batch)


def test_rows_of_a_csr_table() -> None:
    table = PageTable.from_csr(
        int32(0, 3, 5, 8), int32(4, 5, 6, 4, 5, 4, 5, 6), kv_lens=int32(12, 8, 12), page_size=4
    )
    assert PrefixForest.from_page_table(table, int32(12, 8, 12)).nodes.tolist() == [
        [-1, 0, 8, 0, 3],
        [0, 8, 12, 3, 5],
    ]


def test_contiguous_kv_shares_nothing() -> None:
    forest = PrefixForest.from_page_table(PageTable.ragged(int32(0, 4, 8)), int32(4, 4))
    assert forest.num_nodes == 0
    assert forest.members.numel() == 0


def test_slots_that_differ_are_not_shared() -> None:
    """Pages begin with their first slot; what else a table holds inside of one page is not interpreted."""
    table = torch.tensor([[4, 5, 8, 9], [5, 6, 8, 9]], dtype=torch.int32)
    forest = PrefixForest.from_token_table(table, torch.tensor([0, 1]), int32(4, 4), 2)
    assert forest.num_nodes == 0


def test_what_may_be_shared() -> None:
    q_lens = int32(1, 1, 0, 5, 33, 2, 1)
    kv_lens = int32(64, 65, 64, 64, 1000, 1, 16)
    assert shareable(q_lens, kv_lens, 16, 4, 128).tolist() == [48, 64, 0, 48, 0, 0, 0]
    assert shareable(q_lens, kv_lens, 16, 2, 128).tolist() == [48, 64, 0, 48, 960, 0, 0]
    assert shareable(int32(1, 2), int32(-(2**31), -1), 16, 4, 128).tolist() == [0, 0], "no length wraps"


def test_a_chain_of_a_thousand_requests() -> None:
    """Each request leaves one page later than the one before; no recursion may be as deep as that."""
    table = torch.arange(1000, dtype=torch.int32).repeat(1000, 1)
    forest = PrefixForest.from_block_table(table, torch.arange(1000, dtype=torch.int32), 1, max_depth=2000)
    assert forest.nodes[:3].tolist() == [[-1, 0, 1, 0, 999], [0, 1, 2, 999, 1997], [1, 2, 3, 1997, 2994]]
    assert forest.num_nodes == 998


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        (int32(8), r"^shareable: expected 2 entries"),
        (int32(8, -1), r"^shareable\[1\]: expected 0 or more tokens .* got -1"),
        (int32(8, 12), r"^shareable\[1\]: expected 0 or more tokens whose pages the row \[2, 4\) .* got 12"),
    ],
)
def test_bad_lengths(shares: torch.Tensor, match: str) -> None:
    table = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)
    with pytest.raises(ValueError, match=match):
        PrefixForest.from_block_table(table, shares, 4)


def test_bad_rows_of_a_token_table() -> None:
    slots, rows, lens = torch.zeros(2, 8, dtype=torch.int32), torch.tensor([0, 2]), int32(4, 4)
    with pytest.raises(ValueError, match=r"^rows\[1\]: expected a row of the token table, 0\.\.1; got 2"):
        PrefixForest.from_token_table(slots, rows, lens, 4)
    with pytest.raises(
        ValueError,
        match=r"^shareable\[1\]: expected .* whose pages the row \[16, 24\) of the 16 indices holds",
    ):
        PrefixForest.from_page_table(PageTable(slots, rows * 8, rows * 8 + 8, lens, 4, 4, 4), lens)


def test_bad_tensors() -> None:
    table = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^shareable: expected int32; got torch.int64"):
        PrefixForest.from_block_table(table, torch.tensor([4, 4]), 4)
    with pytest.raises(ValueError, match=r"^nodes: expected contiguous \[nodes, 5\]"):
        PrefixForest(torch.zeros(3, 4, dtype=torch.int32), int32(1))
    for depth in (0, -1):
        with pytest.raises(ValueError, match=rf"^max_depth: expected 1 or more; got {depth}"):
            PrefixForest.from_block_table(table, int32(8, 8), 4, max_depth=depth)
        with pytest.raises(ValueError, match=rf"^max_depth: expected 1 or more; got {depth}"):
            PrefixForest.from_paths([[("a", 4)]], int32(4), max_depth=depth)


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        ([[("a", 4), ("b", 4)], []], r"^paths\[0\]: expected increasing ends"),
        ([[("a", 4)], [("a", 8)]], r"^paths\[1\]: expected node 'a' to end at 4 tokens"),
        ([[("a", 4)]], r"^shareable: expected 1 entries"),
    ],
)
def test_bad_paths(paths: list[list[tuple[str, int]]], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PrefixForest.from_paths(paths, int32(4, 4))
