# SPDX-License-Identifier: Apache-2.0
"""Every (packed query row, visible key) is covered by exactly one work item, whatever the lengths."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from examples import share
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import visible
from plan_cases import TILES, PlanCase, cases, visible_range

from fi_backend.core.plan import FIRST_CHUNK, LAST_CHUNK, PLAN_MAGIC, PLAN_VERSION, Plan


def tiles_of(plan: Plan) -> dict[tuple[int, int], list[Any]]:
    """The items of each (request, first row), in KV order."""
    tiles = defaultdict(list)
    for item in sorted(plan.items, key=lambda i: (i["request"], i["q_begin"], i["kv_begin"])):
        tiles[int(item["request"]), int(item["q_begin"])].append(item)
    return tiles


@share(400)
@given(cases())
@example(PlanCase((1,), (2_000_000,), num_ctas=264))
@example(PlanCase((1,), (2_000_000,), num_ctas=264, invariant=True))
@example(PlanCase((4096,), (100_000,), group=64, num_ctas=132))
@example(PlanCase((300, 0, 5), (20, 0, 0), group=7, num_ctas=4))
@example(PlanCase((1,) * 256, (1,) * 256, group=4, heads=8, num_ctas=132))
@example(PlanCase((), (), num_ctas=2))
def test_tiles_partition_the_rows_and_chunks_partition_the_visible_keys(case: PlanCase) -> None:
    tiles = tiles_of(case.plan())
    next_row = [0] * len(case.q_lens)
    for (request, q_begin), items in sorted(tiles.items()):
        rows = case.q_lens[request] * case.group
        assert q_begin == next_row[request]
        height = min((t for t in TILES if rows <= t and case.tiles[0] <= t), default=TILES[-1])
        height = min(height, case.tiles[1])
        for item in items:
            assert item["flags"] < 4
            assert 1 << int(item["tile_log2"]) == height, "the smallest tile that holds the request's rows"
            assert item["q_rows"] == min(height, rows - q_begin)
        next_row[request] += int(items[0]["q_rows"])
        begin, end = visible_range(case, request, q_begin, int(items[0]["q_rows"]))
        assert items[0]["kv_begin"] <= begin
        assert items[-1]["kv_end"] == end
        for before, after in pairwise(items):
            assert before["kv_end"] == after["kv_begin"]
        if len(items) > 1:
            assert all(item["kv_begin"] < item["kv_end"] for item in items)
        flags = [0] * len(items)
        flags[0] |= FIRST_CHUNK
        flags[-1] |= LAST_CHUNK
        assert [item["flags"] for item in items] == flags
    assert next_row == [q_len * case.group for q_len in case.q_lens]


def count_coverage(case: PlanCase, plan: Plan, kv_lens: tuple[int, ...]) -> list[np.ndarray]:
    """How often each (packed row, key) is visited when every item is clamped to `kv_lens` as kernels do."""
    counts = [np.zeros((q * case.group, k), int) for q, k in zip(case.q_lens, kv_lens, strict=True)]
    for item in plan.items:
        rows = slice(item["q_begin"], item["q_begin"] + item["q_rows"])
        begin = 0 if item["flags"] & FIRST_CHUNK else item["kv_begin"]
        end = kv_lens[item["request"]] if item["flags"] & LAST_CHUNK else item["kv_end"]
        counts[item["request"]][rows, begin:end] += 1
    return counts


@share(200)
@given(cases(max_requests=5, max_q=40, max_kv=700), st.data())
def test_a_plan_covers_whatever_the_lengths_turn_out_to_be(case: PlanCase, data: st.DataObject) -> None:
    exact = tuple(data.draw(st.integers(0, 2 * kv_len + 9), label="exact length") for kv_len in case.kv_lens)
    counts = count_coverage(case, case.plan(), exact)
    for count, q_len, kv_len in zip(counts, case.q_lens, exact, strict=True):
        seen = visible(q_len, kv_len, case.causal, case.window_left).repeat_interleave(case.group, dim=0)
        assert (count[seen.numpy()] == 1).all()


@share(200)
@given(cases(max_requests=40, max_kv=100_000))
@example(PlanCase((1,), (1_000_000,), num_ctas=132, invariant=True, costs="fine"))
def test_borders_lie_on_the_grid(case: PlanCase) -> None:
    costs = case.cost_model
    grid = costs.invariant_grid if case.invariant else costs.granule
    for items in tiles_of(case.plan()).values():
        assert items[0]["kv_begin"] % grid == 0
        for item in items[1:]:
            assert item["kv_begin"] % grid == 0
        if len(items) > 1:
            lengths = [int(item["kv_end"] - item["kv_begin"]) for item in items]
            assert len(set(lengths[:-1])) == 1, "equal chunks, the last one shorter"
            assert lengths[-1] <= lengths[0]


@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 1), (2, 16), (16, 16), (17, 32), (33, 64), (65, 128), (999, 128)]
)
def test_the_tile_follows_from_query_length_times_group(rows: int, tile: int) -> None:
    for group in (g for g in (1, 3, 8) if rows % g == 0):
        plan = PlanCase((1, rows // group), (50, 1000), group=group).plan()
        assert {1 << i["tile_log2"] for i in plan.items if i["request"] == 1} == {tile}


@pytest.mark.parametrize(
    ("tiles", "rows", "tile"), [((16, 64), 1, 16), ((16, 64), 65, 64), ((32, 32), 999, 32), ((1, 1), 40, 1)]
)
def test_the_tile_is_one_that_the_kernels_have(tiles: tuple[int, int], rows: int, tile: int) -> None:
    plan = PlanCase((rows,), (1000,), tiles=tiles).plan()
    assert {1 << i["tile_log2"] for i in plan.items} == {tile}
    assert len({int(i["q_begin"]) for i in plan.items}) == -(-rows // tile)


def test_header_states_what_was_planned() -> None:
    case = PlanCase((3, 0, 8), (100, 70, 900), group=2, heads=4, num_ctas=8, first_token=5, spare=(3, 3, 3))
    plan = case.plan()
    header = plan.header
    assert (header["magic"], header["version"]) == (PLAN_MAGIC, PLAN_VERSION)
    assert (header["num_requests"], header["num_tokens"], header["max_kv_len"]) == (3, 11, 900)
    assert (header["num_kv_heads"], header["group"], header["num_ctas"]) == (4, 2, 8)
    assert header["num_items"] == len(plan.items) > 0
    assert header["invariant_grid"] == header["num_queues"] == 0
    assert plan.kv_len_bounds.tolist() == [100, 70, 900]
    invariant = PlanCase((1,), (9,), invariant=True, planned_queues=True, num_ctas=3).plan()
    assert invariant.header["invariant_grid"] == 512
    assert invariant.header["num_queues"] == 3


def test_the_sections_of_a_plan_are_read_only_views_of_its_buffer() -> None:
    plan = PlanCase((1,), (1000,), num_ctas=2).plan()
    for section in (plan.items, plan.kv_len_bounds):
        assert np.shares_memory(section, plan.buffer)
        with pytest.raises(ValueError, match="read-only"):
            section[:] = 0
