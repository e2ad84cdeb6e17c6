# SPDX-License-Identifier: Apache-2.0
"""The prefix tree of a step: what its requests share, and which of it the plan reads once for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import PREFIX, Plan
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits, flat_reason
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step import Step

ALL_TILES = (1, 128)
MAX_LEVELS = 3


@dataclass(frozen=True, slots=True)
class Level:
    """The KV tokens from `begin` to the end of a run are read once by each of `tiles` query tiles."""

    begin: int
    tiles: int


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """KV tokens begin .. end that the same `requests` begin with; level: None where they are not read once.

    children: the runs that follow, by smallest request.
    """

    begin: int
    end: int
    requests: list[int]
    level: Level | None
    children: list[PrefixRun] = field(default_factory=list)

    def walk(self) -> Iterator[PrefixRun]:
        """Yield this run and all below it, parents first."""
        stack = [self]
        while stack:
            run = stack.pop()
            yield run
            stack.extend(reversed(run.children))


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """What a step shares.

    roots: the runs. own: for each request, KV tokens (begin, end) of whole computed pages behind its runs.
    flat_reads, composed_reads: KV tokens that the flat plan and the one with levels read for one KV head.
    token_bytes: K and V of a token in one layer. flat_reason: why there are no levels whatever is shared, or
    None.
    """

    roots: list[PrefixRun]
    own: list[tuple[int, int]]
    flat_reads: int
    composed_reads: int
    token_bytes: int
    flat_reason: str | None

    @property
    def copies(self) -> int:
        """KV tokens that need not be read again when every shared run is read once."""
        return sum((len(run.requests) - 1) * (run.end - run.begin) for run in self.walk())

    def walk(self) -> Iterator[PrefixRun]:
        """Yield all runs, parents first."""
        for root in self.roots:
            yield from root.walk()

    def order(self) -> list[int]:
        """All requests in the order in which the tree's leaves come, those outside of it at the end."""
        inside: dict[int, None] = {}
        for run in self.walk():
            below = {request for child in run.children for request in child.requests}
            ending = [request for request in run.requests if request not in below]
            # Those without pages of their own first.
            inside.update((r, None) for r in sorted(ending, key=lambda r: self.own[r][1] > self.own[r][0]))
        return list(inside) + [request for request in range(len(self.own)) if request not in inside]


def prefix_tree(step: Step, spec: AttentionSpec, flat: Planner, flat_plan: Plan) -> PrefixTree:
    """Find what the requests of a step with a block table share, and plan it.

    flat, flat_plan: the planner and the plan of the same step without sharing.
    """
    qo_indptr, kv_lens = torch.from_numpy(step.qo_indptr), torch.from_numpy(step.kv_lens)
    forest = PrefixForest.of_step(
        _page_table(step), qo_indptr, kv_lens, group=spec.group_size, max_tile=flat.tiles[1]
    )
    requests, tokens = flat.limits.max_requests, flat.limits.max_tokens
    sharing = SharingLimits(max_nodes=requests, max_levels=MAX_LEVELS, max_tokens=tokens)
    planner = Planner(
        spec,
        flat.limits,
        num_ctas=flat_plan.header["num_ctas"],
        costs=flat.costs,
        tiles=step.tiles or ALL_TILES,
        sharing=sharing,
    )
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)
    planner.plan(qo_indptr, kv_lens, buffer, forest)
    composed = Plan(buffer.numpy(), planner.layout)
    roots, ends = _runs(forest, composed, requests)
    whole = np.maximum(step.kv_lens - step.q_lens, 0) // step.page_size * step.page_size
    size: int = getattr(torch, spec.kv_dtype).itemsize
    return PrefixTree(
        roots,
        [(begin, end) for begin, end in zip(ends, whole.tolist(), strict=False)],
        _reads(flat_plan),
        _reads(composed),
        spec.num_kv_heads * (spec.head_dim + spec.head_dim_v) * size,
        flat_reason(spec),
    )


def _page_table(step: Step) -> PageTable:
    rows: Sequence[Sequence[int]] = step.block_table or []
    table = torch.zeros(len(rows), max([1, *map(len, rows)]), dtype=torch.int32)
    for to, row in zip(table, rows, strict=True):
        to[: len(row)] = torch.tensor(row, dtype=torch.int32)
    return PageTable.from_block_table(table, torch.from_numpy(step.kv_lens), page_size=step.page_size)


def _runs(forest: PrefixForest, plan: Plan, requests: int) -> tuple[list[PrefixRun], list[int]]:
    """The roots, and by request where its deepest run ends."""
    levels = _levels(plan)
    members = forest.members.tolist()
    roots: list[PrefixRun] = []
    runs: list[PrefixRun] = []
    ends = [0] * requests
    for parent, begin, end, first, last in forest.nodes.tolist():
        who = members[first:last]
        run = PrefixRun(begin, end, who, levels.get((who[0], end)))
        runs.append(run)
        (runs[parent].children if parent >= 0 else roots).append(run)
        for request in who:
            ends[request] = end
    return roots, ends


def _levels(plan: Plan) -> dict[tuple[int, int], Level]:
    """The plan's nodes by their first member and their end, which no two have in common."""
    items = plan.items[plan.items["flags"] & PREFIX != 0]
    levels = {}
    for index, node in enumerate(plan.nodes):
        own = items[items["request"] == index]
        tiles = len(np.unique(own["q_begin"]))
        levels[int(node["request"]), int(node["kv_end"])] = Level(int(own["kv_begin"].min()), tiles)
    return levels


def _reads(plan: Plan) -> int:
    items = plan.items
    return int((items["kv_end"].astype(np.int64) - items["kv_begin"]).sum())
