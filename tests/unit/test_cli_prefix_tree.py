# SPDX-License-Identifier: Apache-2.0
"""The prefix tree of `explain`: runs of the forest, levels of the plan, sharers side by side."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fi_backend.cli.explain_model import explain_step
from fi_backend.cli.prefix_tree import PrefixTree
from fi_backend.core.planner import CostModel
from fi_backend.core.step import Step

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8)
PAGE = 16


def step_of(rows: list[list[int]], scale: int = 1) -> Step:
    """Decoding requests; each page of `rows` stands for `scale` pages."""
    pages = [[page * scale + i for page in row for i in range(scale)] for row in rows]
    return Step(
        qo_indptr=np.arange(len(rows) + 1),
        kv_lens=np.array([len(row) * PAGE + 1 for row in pages]),
        page_size=PAGE,
        num_qo_heads=4,
        num_kv_heads=1,
        block_table=[[*row, 9999 + i] for i, row in enumerate(pages)],
    )


def tree_of(step: Step, device: str = "cpu") -> PrefixTree:
    found = explain_step(step, num_ctas=2, costs=CostModel.for_device(torch.device(device))).tree
    assert found is not None
    return found


@given(ROWS)
def test_a_run_is_shared_by_exactly_the_requests_with_that_prefix(rows: list[list[int]]) -> None:
    for run in tree_of(step_of(rows)).walk():
        prefix = rows[run.requests[0]][: run.end // PAGE]
        assert run.requests == [r for r, row in enumerate(rows) if row[: run.end // PAGE] == prefix]


@given(ROWS)
def test_runs_and_own_pages_make_up_a_request(rows: list[list[int]]) -> None:
    tree = tree_of(step_of(rows))
    for request, row in enumerate(rows):
        runs = [run for run in tree.walk() if request in run.requests]
        begin, end = tree.own[request]
        borders = [border for run in runs for border in (run.begin, run.end)] + [begin, end]
        assert borders[0] == 0
        assert borders[1:-1:2] == borders[2::2]
        assert end == len(row) * PAGE


@given(ROWS)
def test_copies_are_what_distinct_prefixes_leave_over(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert tree_of(step_of(rows)).copies == PAGE * (sum(map(len, rows)) - len(prefixes))


@given(ROWS)
def test_sharers_are_neighbours(rows: list[list[int]]) -> None:
    tree = tree_of(step_of(rows))
    order = tree.order()
    assert sorted(order) == list(range(len(rows)))
    for run in tree.walk():
        lanes = sorted(order.index(request) for request in run.requests)
        assert lanes == list(range(lanes[0], lanes[0] + len(lanes)))


@settings(max_examples=30, deadline=None)
@given(ROWS, st.sampled_from(("cpu", "cuda")))
def test_levels_account_for_what_is_not_read(rows: list[list[int]], device: str) -> None:
    """Long enough runs that some pay and some do not."""
    tree = tree_of(step_of(rows, scale=30), device)
    saved = sum(
        (len(run.requests) - run.level.tiles) * (run.end - run.level.begin)
        for run in tree.walk()
        if run.level
    )
    assert tree.flat_reads - tree.composed_reads == saved


def test_a_level_reads_what_the_run_above_does_not() -> None:
    """Two pairs part after a short run: each pair reads it with its own."""
    rows = [[0, *([7] * 40)], [0, *([7] * 40)], [0, *([8] * 40)], [0, *([8] * 40)]]
    flat = [[row[0], *(100 * row[1] + i for i in range(40))] for row in rows]
    [root] = tree_of(step_of(flat)).roots
    assert root.level is None
    assert [child.level and child.level.begin for child in root.children] == [0, 0]
