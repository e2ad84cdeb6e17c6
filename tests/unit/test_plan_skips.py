# SPDX-License-Identifier: Apache-2.0
"""What windows and masks of blocks rule out is not in the plan: keys counted over its items.

Beside the rounding to chunk borders nothing may be read that no row sees. Bounds are those of the benchmark
benchmarks/kernels/sparse_cost.py, which measures the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plan_cases import PlanCase

from fi_backend import AttentionSpec, BlockSelection, BlockSparseAttention
from fi_backend.core.plan import Plan

WINDOW, CONTEXT = 1024, 65536
DEVICES = ("cpu", "gpu")


def keys(plan: Plan) -> int:
    """KV rows that a KV head's items read; the tiles of one request read their own."""
    items = plan.items
    return int((items["kv_end"] - items["kv_begin"]).sum())


def cost(plan: Plan) -> int:
    """By the planner's own model: rows, keys and partial states."""
    return int(plan.items["cost"].astype("int64").sum())


@pytest.mark.parametrize("costs", DEVICES)
@pytest.mark.parametrize("requests", [1, 7, 64])
@pytest.mark.parametrize("num_ctas", [2, 132])
def test_a_window_over_a_long_context_reads_what_a_short_context_does(
    requests: int, num_ctas: int, costs: str
) -> None:
    lens = tuple(CONTEXT - 37 * r for r in range(requests))
    windowed = PlanCase(
        (1,) * requests, lens, group=4, heads=8, window_left=WINDOW - 1, num_ctas=num_ctas, costs=costs
    )
    plain = replace(windowed, kv_lens=(WINDOW,) * requests, window_left=-1)
    assert keys(plain.plan()) == requests * WINDOW
    assert requests * WINDOW <= keys(windowed.plan()) <= 1.15 * keys(plain.plan())
    assert cost(windowed.plan()) <= 1.15 * cost(plain.plan())


@pytest.mark.parametrize("costs", DEVICES)
def test_a_prefill_with_a_window_reads_the_windows_of_its_tiles(costs: str) -> None:
    case = PlanCase((2048,), (CONTEXT,), group=4, heads=8, window_left=WINDOW - 1, num_ctas=8, costs=costs)
    plan = case.plan()
    tiles = {int(q): 0 for q in plan.items["q_begin"]}
    for item in plan.items:
        tiles[int(item["q_begin"])] += int(item["kv_end"] - item["kv_begin"])
    rows = int(plan.items["q_rows"].max())
    granule = case.cost_model.granule
    assert max(tiles.values()) <= WINDOW + rows // case.group + granule
    assert keys(plan) <= 0.05 * keys(replace(case, window_left=-1).plan())


def attention(num_heads: int, *, causal: bool) -> BlockSparseAttention:
    spec = AttentionSpec(8, 2, 64, dtype="float32", page_size=64, causal=causal)
    return BlockSparseAttention(
        spec, num_rows=2048, num_cols=8192, block_rows=64, num_heads=num_heads, num_ctas=16
    )


@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_a_tenth_of_the_blocks_costs_a_tenth(num_heads: int) -> None:
    attn = attention(num_heads, causal=False)
    shape = (num_heads, attn.row_blocks, attn.col_blocks)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.1
    dense = attn.plan(torch.ones_like(mask))
    assert dense is not None
    dense_keys, dense_cost = keys(dense), cost(dense)
    sparse = attn.plan(mask)
    assert sparse is not None
    tiles = -(-64 * (8 // max(num_heads, 2)) // int(sparse.items["q_rows"].max()))
    assert keys(sparse) == int(mask.sum()) * 64 * tiles
    assert keys(sparse) <= 0.12 * dense_keys
    assert cost(sparse) <= 0.15 * dense_cost


def test_blocks_behind_the_queries_are_not_read() -> None:
    """Causal: all blocks chosen cost what causal attention does, and no block right of the diagonal."""
    attn = attention(1, causal=True)
    plan = attn.plan(torch.ones(attn.row_blocks, attn.col_blocks, dtype=torch.bool))
    assert plan is not None
    position = torch.arange(1, attn.row_blocks + 1) * 64 + 8192 - 2048
    # The group makes tiles of a block's rows, which end at their own last row.
    assert keys(plan) <= int(position.sum()) * -(-64 * 4 // int(plan.items["q_rows"].max()))


def test_chosen_pages_of_a_request_are_all_that_is_planned() -> None:
    selection = BlockSelection(max_rows=2, max_blocks=8, page_size=16, num_heads=1)
    table = selection.fill_blocks(
        torch.tensor([[5, 3, 60, 7], [1, -1, -1, -1]]),
        torch.tensor([1000, 20], dtype=torch.int32),
        torch.arange(128, dtype=torch.int32).view(2, 64),
    )
    assert table.kv_lens.tolist() == [4 * 16, 4]
