# SPDX-License-Identifier: Apache-2.0
"""Our own attention on a problem of the benchmark, and the other ways of it that are measured beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fi_backend.benchmarks.peers import Problem, Run
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.planner import CostModel
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits

VARIANTS = ("ragged", "page1", "planned_queues", "not_invariant", "flat")
RAGGED, PAGE1, QUEUES, NOT_INVARIANT, FLAT = VARIANTS


class Prepared(NamedTuple):
    """run: runs one layer. prefix_nodes: shared prefixes that became levels of the plan."""

    run: Run
    prefix_nodes: int


def prepare_ours(
    problem: Problem,
    variant: str = "",
    variant_args: Mapping[str, Any] | None = None,
    *,
    kernel: str | None = None,
    costs: CostModel | None = None,
) -> Prepared:
    """Plan the step of `problem` on the host.

    variant: one of VARIANTS, a registered variant of attention with its variant_args, or anything else for
    the usual way. Requests that share pages are planned with the prefixes that the block table shows, as far
    as the planner expects them to pay; "flat" without. kernel, costs: as for BatchAttention.
    """
    spec = problem.spec
    if variant == NOT_INVARIANT:
        spec = replace(spec, batch_invariant=False)
    lens, tokens = problem.kv_lens, problem.q.shape[0]
    shares = bool(problem.prefixes) and variant not in (FLAT, RAGGED)
    attention = BatchAttention(
        spec,
        max_requests=lens.shape[0],
        max_tokens=tokens,
        max_kv_len=int(lens.max()),
        device=problem.q.device,
        planned_queues=variant == QUEUES,
        sharing=SharingLimits.for_limits(lens.shape[0], tokens) if shares else None,
        variant=None if variant_args is None else variant,
        kernel=kernel,
        costs=costs,
    )
    layers = problem.layers
    if variant == RAGGED:
        indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
        indptr[1:] = lens.cumsum(0)
        table = PageTable.ragged(indptr)
        layers = [(key.squeeze(1), value.squeeze(1)) for key, value in problem.layers]
    else:
        table = PageTable.from_block_table(problem.block_table, lens, page_size=spec.page_size)
    plan = attention.plan(
        problem.qo_indptr,
        table,
        qo_indptr_host=problem.qo_indptr.cpu(),
        kv_lens_host=lens.cpu(),
        forest=find_prefixes(problem, attention.planner.tiles[1]) if shares else None,
    )
    out = torch.empty(tokens, spec.num_qo_heads, spec.head_dim_v, dtype=problem.q.dtype, device=lens.device)
    nodes = plan.num_nodes if plan is not None else 0
    return Prepared(
        lambda layer: attention.run(problem.q, *layers[layer], out=out, variant_args=variant_args), nodes
    )


def find_prefixes(problem: Problem, max_tile: int) -> PrefixForest:
    """Return what the block table of `problem` shares, as a serving engine's step would find it.

    max_tile: the planner's greatest query tile.
    """
    lens, spec = problem.kv_lens.cpu(), problem.spec
    return PrefixForest.of_step(
        PageTable.from_block_table(problem.block_table.cpu(), lens, page_size=spec.page_size),
        problem.qo_indptr.cpu(),
        lens,
        group=spec.group_size,
        max_tile=max_tile,
    )
