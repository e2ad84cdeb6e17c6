# SPDX-License-Identifier: Apache-2.0
"""Sizes that callers allocate follow from the limits alone, exactly, and grow with nothing else."""

from __future__ import annotations

import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import COSTS, PlanCase, cases

from fi_backend.core.plan import HEADER, MERGE_UNIT, PREFIX_NODE, WORK_ITEM
from fi_backend.core.planner import Limits, Planner
from fi_backend.core.spec import AttentionSpec


def up(value: int) -> int:
    return -(-value // 128) * 128


def test_records_have_the_size_that_kernels_read() -> None:
    assert (HEADER.itemsize, WORK_ITEM.itemsize, MERGE_UNIT.itemsize, PREFIX_NODE.itemsize) == (
        128,
        32,
        32,
        16,
    )


@share(200)
@given(cases(), st.integers(1, 512))
def test_sections_hold_the_capacities_one_after_another(case: PlanCase, head_dim_v: int) -> None:
    spec = AttentionSpec(
        case.heads * case.group, case.heads, 64, head_dim_v=head_dim_v, batch_invariant=case.invariant
    )
    limits = case.planner().limits
    planner = Planner(
        spec, limits, num_ctas=case.num_ctas, costs=case.cost_model, planned_queues=case.planned_queues
    )
    requests, items, units, parts, rows, queues, entries, nodes, tokens, reports, counters = planner.capacity
    assert (nodes, tokens, reports) == (0, 0, 0)
    assert requests == limits.max_requests
    begin = [0, 128]
    for size in (
        32 * items,
        32 * units,
        4 * parts,
        4 * requests,
        4 * (queues + 1 if queues else 0),
        4 * entries,
        16 * nodes,
        4 * tokens,
        4 * reports,
    ):
        begin.append(up(begin[-1] + size))
    begin.append(up(begin[-1] + 4 * counters))
    assert tuple(planner.layout) == tuple(begin)
    lse_bytes = up(rows * case.heads * 4)
    assert planner.scratch_bytes == up(lse_bytes + rows * case.heads * head_dim_v * 4)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("num_ctas", [1, 2, 132])
def test_scratch_depends_on_the_workers_and_not_on_the_length_of_requests(
    invariant: bool, num_ctas: int
) -> None:
    spec = AttentionSpec(32, 8, 128, batch_invariant=invariant)

    def scratch(limits: Limits) -> int:
        return Planner(spec, limits, num_ctas=num_ctas, costs=COSTS["gpu"]).scratch_bytes

    assert scratch(Limits(256, 8192, 1000)) == scratch(Limits(256, 8192, 10_000_000)) > 0
    assert scratch(Limits(1024, 8192, 1000)) == scratch(Limits(256, 8192, 1000))


def test_one_worker_per_head_needs_little_scratch() -> None:
    """A serving engine counts this memory when it sizes its KV cache: 132 CTAs, 8 heads, D 128."""
    planner = Planner(AttentionSpec(32, 8, 128), Limits(1024, 8192, 131072), num_ctas=132, costs=COSTS["gpu"])
    assert planner.scratch_bytes < 80 << 20
    assert planner.layout.total < 1 << 20


def test_another_default_device_of_torch_changes_nothing() -> None:
    """Engines make the GPU the place of every tensor that names none; plans are made on the host."""
    case = PlanCase((1, 3), (100, 5000), group=4, heads=2, num_ctas=16)
    with torch.device("meta"):
        planner = case.planner()
    assert planner.capacity == case.planner().capacity
    assert case.plan(planner).tobytes() == case.plan().tobytes()
