# SPDX-License-Identifier: Apache-2.0
"""The device finds the host's forests; its source runs here on an emulated cluster of thread blocks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import share
from forest_cases import SharedBatch, assert_is, batches
from hypothesis import given
from hypothesis import strategies as st

from fi_backend.core import jit
from fi_backend.core.page_table import PageTable
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.spec import AttentionSpec

SOURCE = Path(__file__).with_name("native") / "device_forest_host.cc"
BLOCKS = ("64_3", "128_1")  # threads and blocks of the cluster
GROUP, MAX_TILE = 4, 128


@cache
def module() -> Any:
    return jit.load(jit.ModuleSpec("device_forest_host", (str(SOURCE),)))


@cache
def config() -> torch.Tensor:
    spec = AttentionSpec(2 * GROUP, 2, 64)
    return Planner(spec, Limits(1, 1, 1), num_ctas=1, costs=CostModel(), tiles=(1, MAX_TILE)).config


def find(
    table: PageTable,
    q_lens: torch.Tensor,
    *,
    limits: torch.Tensor | None = None,
    max_depth: int = 8,
    blocks: str = "64_3",
    seed: int = 1,
) -> PrefixForest:
    """The forest of requests with `q_lens` query tokens over the rows of `table`."""
    requests = table.num_requests
    nodes = torch.empty(requests, 5, dtype=torch.int32)
    members = torch.empty(requests * max_depth, dtype=torch.int32)
    size = torch.empty(2, dtype=torch.int64)
    qo_indptr = torch.tensor(np.cumsum([3, *q_lens.tolist()]), dtype=torch.int32)
    getattr(module(), f"find_{blocks}")(
        config(),
        qo_indptr,
        table.kv_lens,
        table.indices,
        table.row_begin,
        table.row_end,
        table.index_step,
        table.page_size,
        limits,
        max_depth,
        nodes,
        members,
        size,
        seed,
    )
    return PrefixForest(nodes[: int(size[0])], members[: int(size[1])])


def block_table(batch: SharedBatch) -> PageTable:
    """The batch one token behind what may be shared, so that one query token a request leaves just that."""
    table = batch.block_table(spare_columns=0) if batch.rows else torch.zeros(0, 1, dtype=torch.int32)
    return PageTable.from_block_table(table, batch.shareable + 1, page_size=batch.page_size)


def one_token_each(batch: SharedBatch) -> torch.Tensor:
    return torch.ones(len(batch.rows), dtype=torch.int32)


seeds = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("blocks", BLOCKS)
@share(100)
@given(batches(max_requests=40), seeds)
def test_forests_equal_the_definition(blocks: str, batch: SharedBatch, seed: int) -> None:
    forest = find(
        block_table(batch), one_token_each(batch), max_depth=batch.max_depth, blocks=blocks, seed=seed
    )
    assert_is(forest, batch)


@share(30)
@given(batches(max_pages=60, long_run=1500), seeds)
def test_long_rows(batch: SharedBatch, seed: int) -> None:
    forest = find(block_table(batch), one_token_each(batch), max_depth=batch.max_depth, seed=seed)
    assert_is(forest, batch)


@share(50)
@given(batches(), seeds)
def test_token_tables(batch: SharedBatch, seed: int) -> None:
    slots, rows = batch.token_table()
    table = PageTable.from_token_table(slots, rows, batch.shareable + 1, page_size=batch.page_size)
    forest = find(table, one_token_each(batch), max_depth=batch.max_depth, seed=seed)
    assert_is(forest, batch)


@share(50)
@given(batches(), seeds, st.data())
def test_lengths_and_limits(batch: SharedBatch, seed: int, data: st.DataObject) -> None:
    """What may be shared follows from the lengths on the device, and may be lowered for each request."""
    count = len(batch.rows)
    lens = [data.draw(st.integers(0, len(row) * batch.page_size)) for row in batch.rows]
    q_lens = torch.tensor([data.draw(st.sampled_from((0, 1, 1, 5, 32, 33))) for _ in lens], dtype=torch.int32)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    limits = torch.tensor(
        [data.draw(st.sampled_from((-5, 0, 7, 20, 2**31 - 1))) for _ in lens], dtype=torch.int32
    )
    table = batch.block_table(spare_columns=0) if count else torch.zeros(0, 1, dtype=torch.int32)
    pages = PageTable.from_block_table(table, kv_lens, page_size=batch.page_size)
    may = shareable(q_lens, kv_lens, batch.page_size, GROUP, MAX_TILE)
    may = torch.minimum(may, limits.clamp(min=0))
    host = PrefixForest.from_page_table(pages, may)
    device = find(pages, q_lens, limits=limits, seed=seed)
    torch.testing.assert_close(device.nodes, host.nodes)
    torch.testing.assert_close(device.members, host.members)


def random_tree(requests: int, pages: int, seed: int) -> torch.Tensor:
    """Rows that each take over the beginning of an earlier one, in any order."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 20, (requests, pages), dtype=np.int32)
    for r in range(1, requests):
        cut = rng.integers(0, pages + 1)
        rows[r, :cut] = rows[rng.integers(0, r), :cut]
    return torch.from_numpy(rows[rng.permutation(requests)])


@pytest.mark.parametrize(
    ("requests", "pages", "blocks"),
    [(256, 256, "512_2"), (1024, 40, "512_2"), (1500, 12, "64_3"), (33, 700, "512_2")],
)
def test_large_batches(requests: int, pages: int, blocks: str) -> None:
    table = PageTable.from_block_table(
        random_tree(requests, pages, 5), torch.full((requests,), pages + 1, dtype=torch.int32), page_size=1
    )
    may = torch.full((requests,), pages, dtype=torch.int32)
    may[1024:] = 0
    host = PrefixForest.from_page_table(table, may)
    device = find(table, torch.ones(requests, dtype=torch.int32), blocks=blocks)
    assert host.num_nodes > 10
    torch.testing.assert_close(device.nodes, host.nodes)
    torch.testing.assert_close(device.members, host.members)


def test_pairs_that_no_word_holds() -> None:
    """Parts of one run so long that leaders and common pages are sorted as two words."""
    run, behind = 6 << 20, 16
    first = torch.tensor([0, 1 << 20, 1 << 20, 0])
    pages = (run + behind - first).int()
    indices = torch.zeros(run + behind, dtype=torch.int32)
    indices[run:] = 1
    table = PageTable(indices, first, torch.full((4,), run + behind), pages + 1, page_size=1)
    host = PrefixForest.from_page_table(table, pages)
    device = find(table, torch.ones(4, dtype=torch.int32))
    assert host.num_nodes == 3
    torch.testing.assert_close(device.nodes, host.nodes)
    torch.testing.assert_close(device.members, host.members)


def test_rows_without_bounds_share_nothing() -> None:
    """Bounds that are no range of the table, and lengths beyond a row, never let a page be read outside."""
    indices = torch.zeros(24, dtype=torch.int32)
    begin = torch.tensor([0, 0, -3, 20, 8, 8, 1, 2**62], dtype=torch.int64)
    end = torch.tensor([4, 5, 4, 40, 7, 8, 4, 2**63 - 1], dtype=torch.int64)
    table = PageTable(indices, begin, end, torch.full((8,), 17, dtype=torch.int32), 4)
    forest = find(table, torch.ones(8, dtype=torch.int32))
    assert forest.nodes.tolist() == [[-1, 0, 16, 0, 2]]
    assert forest.members.tolist() == [0, 1]


def test_lengths_that_break_limits_share_nothing() -> None:
    table = PageTable.from_block_table(
        torch.zeros(6, 8, dtype=torch.int32),
        torch.tensor([-5, 32, 32, -(2**31), 33, 33], dtype=torch.int32),
        page_size=4,
    )
    forest = find(table, torch.tensor([1, -3, 2000, 1, 1, 1], dtype=torch.int32))
    assert forest.nodes.tolist() == [[-1, 0, 32, 0, 2]]
    assert forest.members.tolist() == [4, 5]
