# SPDX-License-Identifier: Apache-2.0
"""Batches that share leading pages, and the forest of a batch by its definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from fi_backend.core.prefix_forest import PrefixForest


@dataclass(frozen=True)
class SharedBatch:
    """rows: page ids of each request; pages: how many leading ones may be shared."""

    rows: tuple[tuple[int, ...], ...]
    pages: tuple[int, ...]
    page_size: int = 4
    max_depth: int = 8

    @property
    def shareable(self) -> torch.Tensor:
        return torch.tensor([n * self.page_size for n in self.pages], dtype=torch.int32)

    def block_table(self, *, spare_columns: int = 3) -> torch.Tensor:
        """int32 [requests, width], a view into a wider table; what lies behind a row is garbage."""
        width = max(map(len, self.rows), default=0)
        table = torch.full((len(self.rows), width + spare_columns), -7, dtype=torch.int32)
        for row, pages in zip(table, self.rows, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        return table[:, :width]

    def token_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token slots, int32 [slots, tokens], and the table row of each request, int64, in reverse order."""
        width = max(map(len, self.rows), default=0) * self.page_size
        table = torch.full((len(self.rows) + 1, width), -7, dtype=torch.int32)
        at = torch.arange(len(self.rows), 0, -1, dtype=torch.int64)
        for row, pages in zip(at.tolist(), self.rows, strict=True):
            slots = [page * self.page_size + i for page in pages for i in range(self.page_size)]
            table[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32)
        return table, at

    def paths(self, cut: int) -> list[list[tuple[object, int]]]:
        """Paths in a radix tree whose nodes end where requests part and every `cut` pages."""
        ends = set(map(tuple, self.rows))
        for a in self.rows:
            for b in self.rows:
                common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                ends.add(a[: min(len(a), len(b)) if common is None else common])
        return [
            [
                (row[:end], end * self.page_size)
                for end in range(1, len(row) + 1)
                if row[:end] in ends or end % cut == 0
            ]
            for row in self.rows
        ]

    def expected(self) -> tuple[list[list[int]], list[int]]:
        """Nodes and members of the forest, straight from what a node is."""
        found: list[tuple[list[int], int, int, int]] = []  # members, begin, end, parent in found

        def visit(requests: list[int], begin: int, parent: int, depth: int) -> None:
            by_page: dict[int, list[int]] = {}
            for r in requests:
                if self.pages[r] > begin:
                    by_page.setdefault(self.rows[r][begin], []).append(r)
            for group in by_page.values():
                if len(group) < 2 or depth == self.max_depth:
                    continue
                end = begin + 1
                while (
                    all(self.pages[r] > end for r in group) and len({self.rows[r][end] for r in group}) == 1
                ):
                    end += 1
                found.append((group, begin, end, parent))
                visit(group, end, len(found) - 1, depth + 1)

        visit(list(range(len(self.rows))), 0, -1, 0)
        order = sorted(range(len(found)), key=lambda i: (found[i][0][0], found[i][1]))
        nodes: list[list[int]] = []
        members: list[int] = []
        for group, begin, end, parent in (found[i] for i in order):
            first = len(members)
            members += group
            above = order.index(parent) if parent >= 0 else -1
            nodes.append([above, begin * self.page_size, end * self.page_size, first, len(members)])
        return nodes, members


def assert_is(forest: PrefixForest, batch: SharedBatch) -> None:
    nodes, members = batch.expected()
    np.testing.assert_array_equal(forest.nodes.numpy(), np.reshape(nodes, (-1, 5)), err_msg="nodes")
    np.testing.assert_array_equal(forest.members.numpy(), members, err_msg="members")


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 12, max_pages: int = 12, long_run: int = 0) -> SharedBatch:
    """Rows that follow each other for a while; `long_run`: pages in one go beyond."""
    rows: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, max_requests))):
        row: tuple[int, ...] = ()
        if rows and draw(st.integers(0, 7)):
            source = draw(st.sampled_from(rows))
            row = source[: draw(st.integers(0, len(source)))]
        left = max(0, max_pages - len(row))
        row += tuple(draw(st.lists(st.integers(0, 2), max_size=left)))
        if long_run:
            row += tuple(range(5, 5 + draw(st.integers(0, long_run)))) * draw(st.integers(0, 1))
        rows.append(row)
    order = draw(st.permutations(range(len(rows))))
    shuffled = tuple(rows[i] for i in order)
    whole = draw(st.booleans())
    pages = tuple(len(row) if whole else draw(st.integers(0, len(row))) for row in shuffled)
    return SharedBatch(
        shuffled, pages, draw(st.sampled_from((1, 4, 16))), draw(st.sampled_from((8, 8, 1, 3)))
    )
