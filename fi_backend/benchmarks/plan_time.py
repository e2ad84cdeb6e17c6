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
from fi_backend.core.planner import CostModel, Planner
from fi_backend.core.spec import AttentionSpec

SPEC = AttentionSpec(32, 8, 128, page_size=16)
MAX_KV_LEN = 8192
_SEED = 20260101
_STEPS = 16  # different batches in turn, so that branch predictors do not learn one of them by heart


@dataclass(frozen=True)
class PlanTiming:
    """Microseconds of one call.

    where: "host" is BatchAttention.plan() with the PageTable's construction, "host-native" the planner in it.
    """

    where: str
    batch: int
    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    items: int


@dataclass(frozen=True)
class MixedStep:
    """One step. qo_indptr: int32 [batch + 1]; kv_lens: int32 [batch]; block_table: int32 [batch, pages]."""

    qo_indptr: Tensor
    kv_lens: Tensor
    block_table: Tensor


def mixed_steps(batch: int) -> list[MixedStep]:
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
        steps.append(MixedStep(*map(torch.from_numpy, (qo_indptr, kv_lens, pages))))
    return steps


def time_planning(
    batch: int, num_ctas: int, *, calls: int = 1000, progress: Callable[[], None] = lambda: None
) -> list[PlanTiming]:
    """Time planning for a GPU of `num_ctas` CTAs on this host; progress is called after each row.

    Returns the row of the whole call, then the row of the native planner.
    """
    steps = mixed_steps(batch)
    attention = BatchAttention(
        SPEC,
        max_requests=batch,
        max_tokens=max(int(step.qo_indptr[-1]) for step in steps),
        max_kv_len=MAX_KV_LEN,
        num_ctas=num_ctas,
        costs=CostModel(),
    )

    planner: Planner = attention.planner
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)

    def whole(step: MixedStep) -> Plan:
        table = PageTable.from_block_table(step.block_table, step.kv_lens, page_size=SPEC.page_size)
        planned = attention.plan(step.qo_indptr, table)
        assert planned is not None  # only the device planner leaves none on the host
        return planned

    def native(step: MixedStep) -> None:
        planner.plan(step.qo_indptr, step.kv_lens, buffer)

    items = whole(steps[0]).header["num_items"]
    rows = []
    for where, call in (("host", whole), ("host-native", native)):
        p10, median, p90 = np.percentile(_times(call, steps, calls), [10, 50, 90]).round(2).tolist()
        rows.append(PlanTiming(where, batch, median, p10, p90, calls, items))
        progress()
    return rows


def _times(
    call: Callable[[MixedStep], object], steps: list[MixedStep], calls: int
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
