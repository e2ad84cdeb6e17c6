# SPDX-License-Identifier: Apache-2.0
"""How a device searches tables for prefixes: what it costs, guesses that fail, tables that change meanwhile.

Where no GPU is, the barriers of the first block are what can be counted of the time;
docs/design/device_planner.md says what each is worth.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from native_planner import plan_shared_as_device
from shared_tables import assert_same_bytes, host_plan, page_table, random_case
from test_plan_composed import check_coverage, check_reports

from fi_backend.benchmarks.cuda.plan_time import planner_for_shared_steps
from fi_backend.benchmarks.shared_tables import BATCH, PAGE, SHAPES
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.prefix_forest import PrefixForest

PAGES = 256
STARTS = torch.arange(BATCH + 1, dtype=torch.int32)
LENS = torch.full((BATCH,), PAGES * PAGE - 5, dtype=torch.int32)


def plan_of_table(rows: np.ndarray, blocks: str) -> tuple[Plan, list[int]]:
    """The plan of 256 decode steps, compared with the host's, and what it took: the fields of BlockCounts."""
    planner = planner_for_shared_steps(PAGES * PAGE)
    table = PageTable.from_block_table(torch.from_numpy(np.ascontiguousarray(rows)), LENS, page_size=PAGE)
    counts = torch.zeros(4, dtype=torch.int64)
    plan = plan_shared_as_device(planner, STARTS, table, blocks, counts=counts)
    forest = PrefixForest.of_step(table, STARTS, LENS, group=4, max_tile=128)
    buffer = torch.full((planner.layout.total,), 0xA5, dtype=torch.uint8)
    planner.plan(STARTS, LENS, buffer, forest)
    assert_same_bytes(plan, Plan(buffer.numpy(), planner.layout))
    return plan, counts.tolist()


@pytest.mark.parametrize(
    ("name", "nodes", "block_barriers", "cluster_barriers", "warp_steps"),
    [
        ("nothing", 0, 8, 0, 46),
        ("one prompt", 1, 16, 1, 109),
        ("groups", 33, 17, 1, 125),
        ("four levels", 84, 19, 1, 142),
        ("pairs", 128, 16, 1, 113),
    ],
)
def test_barriers_of_a_serving_step(
    name: str, nodes: int, block_barriers: int, cluster_barriers: int, warp_steps: int
) -> None:
    plan, counts = plan_of_table(SHAPES[name](PAGES), "512_8")
    assert plan.header["num_nodes"] == nodes
    assert counts[0] <= block_barriers
    assert counts[1] <= cluster_barriers
    assert counts[2] <= warp_steps


@pytest.mark.parametrize("blocks", ["512_8", "512_1"])
def test_rows_that_part_between_two_columns(blocks: str) -> None:
    """The columns say nothing of a prefix that ends before the first of them: a second round finds it."""
    rows = SHAPES["nothing"](PAGES)
    rows[:, 0] = 7
    rows[1::2, 1:10] = rows[1, 1:10]
    plan, counts = plan_of_table(rows, blocks)
    assert plan.header["num_nodes"] == 2
    assert counts[1] == 2


@pytest.mark.parametrize("blocks", ["512_8", "512_1"])
def test_columns_that_promise_too_much(blocks: str) -> None:
    """The columns make row 1 the leader of rows that leave it before it leaves row 0: a contradiction."""
    rows = SHAPES["nothing"](PAGES)
    rows[:, :5] = rows[0, :5]
    rows[1, :10] = rows[0, :10]
    rows[2:, 20:] = rows[1, 20:]
    plan, counts = plan_of_table(rows, blocks)
    assert plan.header["num_nodes"] == 2
    assert counts[1] > 1, "a second search began"


seeds = st.integers(0, 2**31 - 1)


@share(60)
@given(seeds)
def test_a_table_that_changes_gives_a_plan_all_the_same(seed: int) -> None:
    """Blocks that see different tables contradict each other: the search ends, and its plan can be run."""
    case, other = random_case(seed), random_case(seed + 1)
    planner, table = case.planner(), page_table(case)
    assert table.indices is not None
    generator = torch.Generator().manual_seed(seed)
    pages = page_table(other).indices
    assert pages is not None
    mixed = table.indices.clone()
    moved = torch.rand(mixed.shape, generator=generator) < (0.02, 0.5, 1.0)[seed % 3]
    mixed[moved] = pages.flatten()[torch.randint(0, pages.numel(), mixed.shape, generator=generator)][moved]
    qo_indptr = case.plan_case.qo_indptr()
    first, others = (table.indices, mixed) if seed % 2 else (mixed, table.indices)
    torn = PageTable(first, table.row_begin, table.row_end, table.kv_lens, table.page_size)
    plan = plan_shared_as_device(planner, qo_indptr, torn, "128_3", seed, others=others)
    check_coverage(case.plan_case, plan)
    check_reports(case.plan_case, plan)
    host = host_plan(planner, case, table)
    assert_same_bytes(plan_shared_as_device(planner, qo_indptr, table, "128_3", seed), host)
