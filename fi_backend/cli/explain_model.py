# SPDX-License-Identifier: Apache-2.0
"""What `explain` shows, as numbers: the block-sparse matrix, the prefix tree and the load of each CTA."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fi_backend.cli.prefix_tree import ALL_TILES, PrefixTree, prefix_tree
from fi_backend.core.plan import Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step import Step

EMPTY, PARTIAL, FULL, SHARED = range(4)
_MOST_PAGES = 1 << 22  # each is an object here: half a GB
_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TileRow:
    """One query tile: packed rows q_begin .. q_begin + q_rows of a request; the chunks of its KV range."""

    request: int
    q_begin: int
    q_rows: int
    height: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def kv_begin(self) -> int:
        """First KV token that the tile can see."""
        return self.chunks[0][0]

    @property
    def kv_end(self) -> int:
        """One past the last KV token that the tile can see."""
        return self.chunks[-1][1]


@dataclass(frozen=True)
class BlockMatrix:
    """Query tiles x pages, as coordinates of the blocks that are not empty.

    tiles: the rows. pages: int [columns], the page id of each column, in order of first use.
    row, column: int [blocks]. kind: PARTIAL (a mask, a length or a window cuts the block), FULL, or
    SHARED (full, and a page of more than one request).
    """

    tiles: tuple[TileRow, ...]
    pages: _Array
    row: _Array
    column: _Array
    kind: _Array

    def image(self, max_rows: int, max_columns: int) -> _Array:
        """The matrix as kinds, int8 [rows, columns]; a too large one is reduced to the largest kinds."""
        rows, columns = min(len(self.tiles), max_rows), min(len(self.pages), max_columns)
        image = np.zeros((rows, columns), np.int8)
        if self.row.size:
            at = (self.row * rows // len(self.tiles), self.column * columns // len(self.pages))
            np.maximum.at(image, at, self.kind)
        return image


@dataclass(frozen=True)
class CtaLoads:
    """What each CTA does when items are drawn longest first and costs are as the planner estimates them.

    tickets: per CTA the (item, KV head) pairs, int [n, 2]. costs: per CTA their costs. by_tile: [CTAs, 5],
    cost of each CTA by query tile height 1, 16, 32, 64, 128.
    """

    tickets: tuple[_Array, ...]
    costs: tuple[_Array, ...]
    by_tile: _Array

    @property
    def total(self) -> _Array:
        """Cost of each CTA, int [CTAs]."""
        totals: _Array = self.by_tile.sum(1)
        return totals

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        mean = float(self.total.mean())
        return float(self.total.max()) / mean if mean else 1.0


@dataclass(frozen=True)
class Explanation:
    """Everything about one step that the drawings need.

    plan, matrix, loads: where every request reads its own KV. tree: None without a block table.
    """

    step: Step
    plan: Plan
    matrix: BlockMatrix
    tree: PrefixTree | None
    order: list[int]
    loads: CtaLoads


def explain_step(step: Step, *, num_ctas: int, costs: CostModel, planned_queues: bool = False) -> Explanation:
    """Plan `step` over `num_ctas` and work out what is to be drawn.

    Raises ValueError naming the field that the planner or a drawing cannot take.
    """
    if (pages := int(step.num_pages.sum(dtype=np.int64))) > _MOST_PAGES:
        raise ValueError(
            f"kv_lens: expected at most {_MOST_PAGES} pages of {step.page_size} tokens to draw; got {pages}."
        )
    spec = AttentionSpec(
        step.num_qo_heads,
        step.num_kv_heads,
        step.head_dim,
        page_size=step.page_size,
        causal=step.causal,
        window_left=step.window_left,
        batch_invariant=step.batch_invariant,
    )
    requests, tokens = step.kv_lens.size, int(step.qo_indptr[-1])
    limits = Limits(max(requests, 1), max(tokens, 1), max(int(step.kv_lens.max(initial=0)), 1))
    planner = Planner(
        spec,
        limits,
        num_ctas=num_ctas,
        costs=costs,
        planned_queues=planned_queues,
        tiles=step.tiles or ALL_TILES,
    )
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)
    planner.plan(torch.from_numpy(step.qo_indptr), torch.from_numpy(step.kv_lens), buffer)
    plan = Plan(buffer.numpy(), planner.layout)

    tree = None if step.block_table is None else prefix_tree(step, spec, planner, plan)
    order = list(range(requests)) if tree is None else tree.order()
    matrix = _matrix(step, plan, _page_rows(step), order)
    return Explanation(step, plan, matrix, tree, order, cta_loads(plan))


def _page_rows(step: Step) -> list[list[int]]:
    """Page ids of each request; without a block table, pages of its own, numbered through."""
    counts = step.num_pages.tolist()
    if step.block_table is not None:
        return [row[:count] for row, count in zip(step.block_table, counts, strict=True)]
    starts = np.cumsum([0, *counts]).tolist()
    return [list(range(start, start + count)) for start, count in zip(starts, counts, strict=False)]


def _tiles(items: _Array, order: Sequence[int]) -> list[TileRow]:
    rows: list[TileRow] = []
    for item in np.sort(items, order=("request", "q_begin", "kv_begin")):
        chunk = (int(item["kv_begin"]), int(item["kv_end"]))
        key = (int(item["request"]), int(item["q_begin"]))
        if rows and (rows[-1].request, rows[-1].q_begin) == key:
            last = rows[-1]
            rows[-1] = TileRow(*key, last.q_rows, last.height, (*last.chunks, chunk))
        else:
            rows.append(TileRow(*key, int(item["q_rows"]), 1 << int(item["tile_log2"]), (chunk,)))
    lane = {request: index for index, request in enumerate(order)}
    return sorted(rows, key=lambda tile: lane[tile.request])


def _matrix(step: Step, plan: Plan, rows: Sequence[Sequence[int]], order: Sequence[int]) -> BlockMatrix:
    # Sharers are neighbours and columns come in order of first use: a permutation of the matrix that shows
    # the blocks which page ids scatter.
    used = np.asarray([page for request in order for page in rows[request]], np.int64)
    ids, first_use, owners = np.unique(used, return_index=True, return_counts=True)
    by_use = np.argsort(first_use)
    rank = np.argsort(by_use)
    size, group = step.page_size, step.num_qo_heads // step.num_kv_heads
    tiles = _tiles(plan.items, order)
    found_row, found_column, found_kind = [], [], []
    for index, tile in enumerate(tiles):
        if tile.kv_end <= tile.kv_begin:
            continue
        kv_len, q_len = int(step.kv_lens[tile.request]), int(step.q_lens[tile.request])
        first = kv_len - q_len + tile.q_begin // group
        last = kv_len - q_len + (tile.q_begin + tile.q_rows - 1) // group
        # Chunks begin on coarse borders; what lies wholly before the window is never read.
        visible_from = (
            max(tile.kv_begin, first - step.window_left) if step.window_left >= 0 else tile.kv_begin
        )
        depth = np.arange(visible_from // size, -(-tile.kv_end // size))
        # A block is full when the first row sees its last token and the last row's window its first.
        seen_to = min(kv_len, first + 1) if step.causal else kv_len
        seen_from = last - step.window_left if step.window_left >= 0 else 0
        page = np.searchsorted(ids, np.asarray(rows[tile.request])[depth])
        full = ((depth + 1) * size <= seen_to) & (depth * size >= seen_from)
        found_row.append(np.full(depth.size, index))
        found_column.append(rank[page])
        found_kind.append(np.where(full, np.where(owners[page] > 1, SHARED, FULL), PARTIAL))
    empty = np.zeros(0, np.int64)
    joined = [np.concatenate(part) if part else empty for part in (found_row, found_column, found_kind)]
    return BlockMatrix(tuple(tiles), ids[by_use], *joined)


def cta_loads(plan: Plan) -> CtaLoads:
    """Return what each CTA does under `plan`."""
    items, header = plan.items, plan.header
    tickets = plan.queues or _draw(items["cost"].tolist(), header["num_kv_heads"], header["num_ctas"])
    columns = np.searchsorted([0, 4, 5, 6, 7], items["tile_log2"])
    costs = tuple(items["cost"][pairs[:, 0]].astype(np.int64) for pairs in tickets)
    by_tile = np.zeros((len(tickets), 5), np.int64)
    for cta, (pairs, cost) in enumerate(zip(tickets, costs, strict=True)):
        np.add.at(by_tile[cta], columns[pairs[:, 0]], cost)
    return CtaLoads(tuple(tickets), costs, by_tile)


def _draw(costs: list[int], num_kv_heads: int, num_ctas: int) -> list[_Array]:
    """Let whoever is free first take the next (item, KV head), if an item takes as long as its cost says."""
    free = [(0, cta) for cta in range(num_ctas)]
    taken: list[list[tuple[int, int]]] = [[] for _ in range(num_ctas)]
    for item, cost in enumerate(costs):
        for head in range(num_kv_heads):
            time, cta = heapq.heappop(free)
            taken[cta].append((item, head))
            heapq.heappush(free, (time + cost, cta))
    return [np.asarray(pairs, np.int64).reshape(-1, 2) for pairs in taken]
