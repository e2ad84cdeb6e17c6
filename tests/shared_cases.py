# SPDX-License-Identifier: Apache-2.0
"""Steps whose requests share leading pages, for tests of composed plans, and strategies that draw them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st
from plan_cases import COSTS, PlanCase

from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.sharing import SharingLimits

EAGER_STEP = PlanCase((), (), costs="eager")
ROOMY = SharingLimits(max_nodes=64, max_levels=8, max_tokens=4096)

Branch = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """A step whose requests lie in a tree.

    paths: the branch of each request, of any depth; requests share the pages of the branches with which both
    of theirs begin. run_pages: pages of a branch (default: 1). own: KV tokens of a request behind its branch,
    the queries among them. step: all but the lengths, which follow.
    """

    paths: tuple[Branch, ...]
    run_pages: dict[Branch, int]
    q_lens: tuple[int, ...]
    own: tuple[int, ...]
    page_size: int = 16
    sharing: SharingLimits = ROOMY
    step: PlanCase = EAGER_STEP

    def _pages(self, path: Branch) -> int:
        return sum(self.run_pages.get(path[: i + 1], 1) for i in range(len(path)))

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(
            self._pages(path) * self.page_size + own for path, own in zip(self.paths, self.own, strict=True)
        )

    @property
    def plan_case(self) -> PlanCase:
        return replace(self.step, q_lens=self.q_lens, kv_lens=self.kv_lens)

    def rows(self) -> list[list[int]]:
        """Page ids of each request."""
        ids: dict[Branch, list[int]] = {}
        count = 0
        result = []
        for path, kv_len in zip(self.paths, self.kv_lens, strict=True):
            row: list[int] = []
            for i in range(len(path)):
                run = path[: i + 1]
                if run not in ids:
                    ids[run] = list(range(count, count + self.run_pages.get(run, 1)))
                    count += len(ids[run])
                row += ids[run]
            own = -(-kv_len // self.page_size) - len(row)
            row += range(count, count + own)
            count += own
            result.append(row)
        return result

    def forest(self) -> PrefixForest:
        rows = self.rows()
        table = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int32)
        for to, row in zip(table, rows, strict=True):
            to[: len(row)] = torch.tensor(row, dtype=torch.int32)
        q_lens, kv_lens = (torch.tensor(n, dtype=torch.int32) for n in (self.q_lens, self.kv_lens))
        share = shareable(q_lens, kv_lens, self.page_size, self.step.group, self.step.tiles[1])
        return PrefixForest.from_block_table(table, share, self.page_size, max_depth=32)

    def planner(self) -> Planner:
        return self.plan_case.planner(sharing=self.sharing, page_size=self.page_size)

    def plan(self, planner: Planner | None = None, *, forest: PrefixForest | None = None) -> Plan:
        """Plan into garbage."""
        planner = planner or self.planner()
        case = self.plan_case
        buffer = torch.full((planner.layout.total,), 0xA5, dtype=torch.uint8)
        kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
        planner.plan(case.qo_indptr(), kv_lens, buffer, self.forest() if forest is None else forest)
        return Plan(buffer.numpy(), planner.layout)


def reads(plan: Plan) -> int:
    """KV tokens that the items of a plan read, for one KV head."""
    items = plan.items
    return int((items["kv_end"].astype(np.int64) - items["kv_begin"]).sum())


@st.composite
def shared_cases(draw: st.DrawFn, max_requests: int = 14, max_pages: int = 40) -> SharedCase:
    """Trees of any shape in any order of requests; now and then a prefill chunk or an empty request."""
    branch = st.lists(st.integers(0, 2), min_size=0, max_size=4).map(tuple)
    few = draw(st.lists(branch, min_size=1, max_size=4))
    path = st.one_of(st.sampled_from(few), st.sampled_from(few), branch)
    paths = tuple(draw(st.lists(path, min_size=0, max_size=max_requests)))
    runs = sorted({p[: i + 1] for p in paths for i in range(len(p))})
    lengths = st.one_of(st.integers(0, 3), st.integers(0, max_pages))
    q_len = st.one_of(st.just(1), st.just(1), st.integers(0, 6), st.integers(0, 300))
    q_lens = tuple(draw(q_len) for _ in paths)
    step = PlanCase(
        (),
        (),
        group=draw(st.sampled_from((1, 4, 5, 7, 8, 64))),
        heads=draw(st.sampled_from((1, 2, 8))),
        causal=draw(st.sampled_from((True, True, False))),
        num_ctas=draw(st.sampled_from((1, 2, 16, 132))),
        costs=draw(st.sampled_from(("eager", "eager", "eager", *sorted(COSTS)))),
        planned_queues=draw(st.booleans()),
        spare=draw(st.sampled_from(((0, 0, 0), (5, 70, 1000)))),
        first_token=draw(st.sampled_from((0, 7))),
        tiles=draw(st.sampled_from(((1, 128), (16, 128), (16, 64)))),
    )
    limits = st.builds(SharingLimits, st.integers(1, 6), st.integers(1, 4), st.integers(1, 40))
    return SharedCase(
        paths=paths,
        run_pages={run: draw(lengths) for run in runs},
        q_lens=q_lens,
        own=tuple(q + draw(st.one_of(st.just(0), st.integers(0, 400))) for q in q_lens),
        page_size=draw(st.sampled_from((1, 3, 16, 64))),
        sharing=draw(st.one_of(st.just(ROOMY), limits)),
        step=step,
    )
