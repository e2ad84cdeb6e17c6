# SPDX-License-Identifier: Apache-2.0
"""How long the host takes to plan a step of mixed lengths."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import QUERY_TILES, CostModel, Planner
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

SPEC = AttentionSpec(32, 8, 128, page_size=16)
MAX_KV_LEN = 8192
_SEED = 20260101
_PREFIX, _GROUP = 1024, 8  # of shared steps: tokens of each of two levels, requests of the second one
_STEPS = 16  # different batches in turn, so that branch predictors do not learn one of them by heart


@dataclass(frozen=True)
class PlanTiming:
    """Microseconds of one call.

    where: "host" is BatchAttention.plan() with the PageTable's construction, "host-native" the planner in it;
    of shared steps "host" finds the prefix forest, too, which is "host-forest".
    """

    where: str
    batch: int
    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    items: int


@dataclass(frozen=True)
class PlannedStep:
    """One step. qo_indptr: int32 [batch + 1]; kv_lens: int32 [batch]; block_table: int32 [batch, pages]."""

    qo_indptr: Tensor
    kv_lens: Tensor
    block_table: Tensor


def mixed_steps(batch: int) -> list[PlannedStep]:
    """Return steps of `batch` requests: decode, and one in sixteen a prefill chunk of 64 to 512 tokens.

    KV lengths are log-uniform from 64 to 8192 tokens. The seed is fixed.
    """
    rng = np.random.default_rng(_SEED + batch)
    steps = []
    for _ in range(_STEPS):
        kv_lens = np.exp(rng.uniform(np.log(64), np.log(MAX_KV_LEN), batch)).astype(np.int32)
        q_lens = np.ones(batch, np.int32)
        prefills = rng.choice(batch, batch // 16, replace=False)
        q_lens[prefills] = np.minimum(rng.integers(64, 513, prefills.size), kv_lens[prefills])
        qo_indptr = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
        pages = rng.integers(0, 1 << 20, (batch, MAX_KV_LEN // SPEC.page_size), dtype=np.int32)
        steps.append(PlannedStep(*map(torch.from_numpy, (qo_indptr, kv_lens, pages))))
    return steps


def shared_steps(batch: int) -> list[PlannedStep]:
    """Return decode steps of `batch` requests behind a prompt of 1024 tokens, groups of eight behind another.

    Each has log-uniformly 64 to 4096 tokens of its own. Members of a group are no neighbours. The seed is
    fixed.
    """
    rng = np.random.default_rng(_SEED + batch)
    level = _PREFIX // SPEC.page_size
    steps = []
    for _ in range(_STEPS):
        own = np.exp(rng.uniform(np.log(64), np.log(MAX_KV_LEN // 2), batch)).astype(np.int32)
        pages = rng.permutation(batch * (MAX_KV_LEN // SPEC.page_size)).astype(np.int32).reshape(batch, -1)
        pages[:, :level] = pages[0, :level]
        groups = np.arange(batch) % -(-batch // _GROUP)
        pages[:, level : 2 * level] = pages[groups, level : 2 * level]
        qo_indptr = np.arange(batch + 1, dtype=np.int32)
        steps.append(PlannedStep(*map(torch.from_numpy, (qo_indptr, 2 * _PREFIX + own, pages))))
    return steps


def time_planning(
    batch: int,
    num_ctas: int,
    *,
    shared: bool = False,
    calls: int = 1000,
    progress: Callable[[], None] = lambda: None,
) -> list[PlanTiming]:
    """Time planning for a GPU of `num_ctas` CTAs on this host; progress is called after each row.

    shared: time shared_steps() instead of mixed_steps(). Returns the row of the whole call, then the row of
    the native planner, and with `shared` the row of the forest.
    """
    steps = shared_steps(batch) if shared else mixed_steps(batch)
    attention = BatchAttention(
        SPEC,
        max_requests=batch,
        max_tokens=max(int(step.qo_indptr[-1]) for step in steps),
        max_kv_len=MAX_KV_LEN,
        num_ctas=num_ctas,
        costs=CostModel(),
        sharing=SharingLimits.for_limits(batch, batch) if shared else None,
    )

    planner: Planner = attention.planner
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)

    def find(step: PlannedStep) -> PrefixForest | None:
        if not shared:
            return None
        pages = shareable(
            step.qo_indptr.diff(), step.kv_lens, SPEC.page_size, SPEC.group_size, QUERY_TILES[-1]
        )
        return PrefixForest.from_block_table(step.block_table, pages, SPEC.page_size)

    def whole(step: PlannedStep) -> Plan:
        table = PageTable.from_block_table(step.block_table, step.kv_lens, page_size=SPEC.page_size)
        planned = attention.plan(step.qo_indptr, table, forest=find(step))
        assert planned is not None  # only the device planner leaves none on the host
        return planned

    forests = {id(step): find(step) for step in steps}

    def native(step: PlannedStep) -> None:
        planner.plan(step.qo_indptr, step.kv_lens, buffer, forests[id(step)])

    items = whole(steps[0]).header["num_items"]
    rows = []
    timed: list[tuple[str, Callable[[PlannedStep], object]]] = [("host", whole), ("host-native", native)]
    if shared:
        timed.append(("host-forest", find))
    for where, call in timed:
        p10, median, p90 = np.percentile(_times(call, steps, calls), [10, 50, 90]).round(2).tolist()
        rows.append(PlanTiming(where, batch, median, p10, p90, calls, items))
        progress()
    return rows


def _times(
    call: Callable[[PlannedStep], object], steps: list[PlannedStep], calls: int
) -> npt.NDArray[np.float64]:
    for step in steps:
        call(step)
    times = np.empty(calls)
    gc.collect()
    gc.disable()
    try:
        for i in range(calls):
            step = steps[i % len(steps)]
            begin = time.perf_counter_ns()
            call(step)
            times[i] = time.perf_counter_ns() - begin
    finally:
        gc.enable()
    return times / 1000
