# SPDX-License-Identifier: Apache-2.0
"""Cases for the planner tests: what to plan, under which limits, and strategies that draw them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from fi_backend.core.plan import Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

TILES = (1, 16, 32, 64, 128)
COSTS = {
    "gpu": CostModel(),
    "cpu": CostModel.for_device(torch.device("cpu")),
    "fine": CostModel(granule=4, min_chunk=4, invariant_grid=8),
    "coarse": CostModel(granule=96, min_chunk=1000, part_cost=5000, invariant_grid=640, share_cost=5000),
    "cheap levels": CostModel(granule=96, min_chunk=1000, part_cost=5000, invariant_grid=640, share_cost=200),
    "overlap": CostModel(granule=16, min_chunk=64, invariant_grid=64, overlap=True),
    # Sharing pays wherever it saves a key.
    "eager": CostModel(granule=16, min_chunk=16, alpha=0, beta=(1, 1, 1, 1, 1), part_cost=0, share_cost=0),
}


@dataclass(frozen=True)
class PlanCase:
    """One step: lengths, the spec's numbers, and spare room of the limits above what the step needs."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    group: int = 1
    heads: int = 1
    causal: bool = True
    window_left: int = -1
    invariant: bool = False
    num_ctas: int = 1
    costs: str = "gpu"
    planned_queues: bool = False
    longest_first: bool = True
    spare: tuple[int, int, int] = (0, 0, 0)
    first_token: int = 0
    tiles: tuple[int, int] = (1, 128)

    @property
    def cost_model(self) -> CostModel:
        return COSTS[self.costs]

    def planner(self, *, sharing: SharingLimits | None = None, page_size: int = 16) -> Planner:
        spec = AttentionSpec(
            self.heads * self.group,
            self.heads,
            64,
            causal=self.causal,
            window_left=self.window_left,
            batch_invariant=self.invariant,
            page_size=page_size,
        )
        needed = (len(self.q_lens), sum(self.q_lens), max(self.kv_lens, default=0))
        limits = Limits(*(max(1, n + s) for n, s in zip(needed, self.spare, strict=True)))
        return Planner(
            spec,
            limits,
            num_ctas=self.num_ctas,
            costs=self.cost_model,
            planned_queues=self.planned_queues,
            longest_first=self.longest_first,
            tiles=self.tiles,
            sharing=sharing,
        )

    def qo_indptr(self) -> torch.Tensor:
        return torch.tensor(np.cumsum([self.first_token, *self.q_lens]), dtype=torch.int32)

    def plan(self, planner: Planner | None = None, *, poison: int = 0) -> Plan:
        planner = planner or self.planner()
        buffer = torch.full((planner.layout.total,), poison, dtype=torch.uint8)
        self.fill(planner, buffer)
        return Plan(buffer.numpy(), planner.layout)

    def fill(self, planner: Planner, buffer: torch.Tensor) -> None:
        planner.plan(self.qo_indptr(), torch.tensor(self.kv_lens, dtype=torch.int32), buffer)


def cases(*, max_requests: int = 12, max_q: int = 300, max_kv: int = 5000) -> st.SearchStrategy[PlanCase]:
    """Steps of any kind: decode, prefill, mixed, empty requests, more queries than keys, all equal."""
    q_len = st.one_of(st.just(1), st.integers(0, 3), st.integers(0, max_q))
    kv_len = st.one_of(st.just(0), st.integers(0, 64), st.integers(0, max_kv))
    mixed = st.lists(st.tuples(q_len, kv_len), min_size=0, max_size=max_requests)
    equal = st.tuples(st.tuples(q_len, kv_len), st.integers(1, max_requests)).map(lambda t: [t[0]] * t[1])
    return st.builds(
        lambda lens, **fields: PlanCase(tuple(q for q, _ in lens), tuple(k for _, k in lens), **fields),
        st.one_of(mixed, equal),
        group=st.one_of(st.sampled_from((1, 2, 4, 8)), st.integers(1, 64)),
        heads=st.sampled_from((1, 2, 3, 8)),
        causal=st.booleans(),
        window_left=st.one_of(st.just(-1), st.integers(0, 70), st.integers(0, max_kv)),
        invariant=st.booleans(),
        num_ctas=st.one_of(st.integers(1, 8), st.sampled_from((64, 132, 264))),
        costs=st.sampled_from(sorted(COSTS)),
        planned_queues=st.booleans(),
        spare=st.one_of(
            st.just((0, 0, 0)), st.tuples(st.integers(0, 300), st.integers(0, 5000), st.integers(0, 100000))
        ),
        first_token=st.sampled_from((0, 7)),
        tiles=st.sampled_from(((1, 128), (1, 128), (16, 128), (16, 64), (1, 1), (32, 32))),
    )


def visible_range(case: PlanCase, request: int, q_begin: int, q_rows: int) -> tuple[int, int]:
    """Smallest range that holds every key which one of the packed rows sees; (0, 0) when there is none."""
    q_len, kv_len = case.q_lens[request], case.kv_lens[request]
    begin, end = kv_len, 0
    for row in range(q_begin, q_begin + q_rows):
        position = kv_len - q_len + row // case.group
        first = max(0, position - case.window_left) if case.window_left >= 0 else 0
        last = min(position + 1, kv_len) if case.causal else kv_len
        if first < last:
            begin, end = min(begin, first), max(end, last)
    return (begin, end) if begin < end else (0, 0)


# A chunk of a prompt beside decoding requests, under costs that let both overlap.
MIXED = PlanCase((500, *(1,) * 64), (8192, *(4096,) * 64), num_ctas=132, heads=8, group=4, costs="overlap")
