# SPDX-License-Identifier: Apache-2.0
"""How long a GPU takes to plan a decode step, and to find what its requests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fi_backend.benchmarks.shared_tables import BATCH, PAGE, SHAPES
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

SPEC = AttentionSpec(32, 8, 128, page_size=PAGE)
TILES = (16, 128)
BATCHES = (16, 64, 256, 1024)
CONTEXTS = (4096, 32768)
PLANS = 20
"""Plans in the graph that is timed, so that its launch is shared."""
_TOKENS, _CONTEXT, _SEED = 8192, 131072, 0
_LIMITED_GPU, _LIMITED_BATCH = "H200", 256
_PLAN_LIMIT_US = 8.0
_DETECTION_LIMITS_US = {4096: 15.0, 32768: 30.0}
# Replays' times of a function that queues a step PLANS times, in microseconds.
Timer = Callable[[Callable[[], Tensor]], list[float]]


@dataclass(frozen=True)
class DevicePlanTiming:
    """Microseconds of one plan on a device, its launch included.

    where: "device", or "device-shared" with detection of shared prefixes. step: what is planned. context: KV
    tokens of the longest request. calls: plans timed. items, prefix_nodes: of the plan. limit_us: what it may
    take, on the GPU that the limit is for, else None. failed: why the row does not stand, or empty.
    """

    where: str
    step: str
    batch: int
    context: int
    median_us: float
    p10_us: float
    p90_us: float
    calls: int
    items: int
    prefix_nodes: int
    limit_us: float | None
    failed: str


class DeviceStep:
    """One step whose tensors lie on a device, and the planner that plans it there.

    qo_indptr: host int32 [requests + 1]. kv_lens: host int32 [requests]. block_table: host int32 [requests,
    pages]; given, shared prefixes are looked for. All keep their place on the device.
    """

    def __init__(
        self,
        planner: Planner,
        qo_indptr: Tensor,
        kv_lens: Tensor,
        device: torch.device,
        block_table: Tensor | None = None,
    ) -> None:
        self.planner, self.qo_indptr, self.kv_lens, self.block_table = (
            planner,
            qo_indptr,
            kv_lens,
            block_table,
        )
        self.device_starts, self.device_lens = qo_indptr.to(device), kv_lens.to(device)
        self.table: PageTable | None = None
        if block_table is not None:
            self.table = PageTable.from_block_table(block_table.to(device), self.device_lens, page_size=PAGE)
        self.buffer = torch.zeros(planner.layout.total, dtype=torch.uint8, device=device)
        planner.prepare(self.buffer.device)

    def fill(self, block_table: Tensor) -> None:
        """Put other pages of the same shape where the step's are."""
        assert self.table is not None
        assert self.table.indices is not None
        self.block_table = block_table
        self.table.indices.copy_(block_table.reshape(self.table.indices.shape))

    def plan(self) -> Tensor:
        """Queue one plan; return its buffer."""
        self.planner.plan_on_device(self.device_starts, self.device_lens, self.buffer, self.table)
        return self.buffer

    def planned(self) -> Plan:
        """Return the last plan, waiting for it."""
        return Plan(self.buffer.cpu().numpy(), self.planner.layout)

    def expected(self) -> Plan:
        """Return the host's plan of the same step."""
        forest = None
        if self.block_table is not None:
            forest = PrefixForest.of_step(
                PageTable.from_block_table(self.block_table, self.kv_lens, page_size=PAGE),
                *(self.qo_indptr, self.kv_lens),
                group=SPEC.group_size,
                max_tile=TILES[1],
            )
        buffer = torch.zeros(self.planner.layout.total, dtype=torch.uint8)
        self.planner.plan(self.qo_indptr, self.kv_lens, buffer, forest)
        return Plan(buffer.numpy(), self.planner.layout)


def planner_for_steps(max_requests: int = 1024, num_ctas: int = 132) -> Planner:
    """Return a planner of steps without shared prefixes, with costs under which much is split."""
    limits = Limits(max_requests, _TOKENS, _CONTEXT)
    return Planner(SPEC, limits, num_ctas=num_ctas, costs=CostModel(), tiles=TILES)


def planner_for_shared_steps(max_kv_len: int, num_ctas: int = 132) -> Planner:
    """Return a planner of BATCH requests that share prefixes, with costs under which many of them pay."""
    return Planner(
        SPEC,
        Limits(BATCH, _TOKENS, max_kv_len),
        num_ctas=num_ctas,
        costs=CostModel(),
        tiles=TILES,
        sharing=SharingLimits.for_limits(BATCH, _TOKENS),
    )


def flat_steps() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, qo_indptr, kv_lens) of decode steps of every batch size, and one with prefills."""
    drawn = random.Random(_SEED)

    def lengths(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for batch in BATCHES:
        starts = torch.arange(batch + 1, dtype=torch.int32)
        yield "even", starts, lengths([4096] * batch)
        yield "uneven", starts, lengths([drawn.randint(1, 16000) for _ in range(batch)])
        yield "skewed", starts, lengths([_CONTEXT] + [500] * (batch - 1))
    starts = torch.cat([torch.arange(201), torch.tensor([1200, 2700, 8000])]).to(torch.int32)
    yield "mixed", starts, lengths([drawn.randint(1, 16000) for _ in range(200)] + [1000, 9000, 5300])


def shared_step(context: int, device: torch.device, num_ctas: int = 132) -> DeviceStep:
    """Return a decode step of BATCH requests over `context` tokens each, less five, with nothing shared."""
    pages = context // PAGE
    return DeviceStep(
        planner_for_shared_steps(context, num_ctas),
        torch.arange(BATCH + 1, dtype=torch.int32),
        torch.full((BATCH,), context - 5, dtype=torch.int32),
        device,
        torch.from_numpy(SHAPES["nothing"](pages)),
    )


def time_device_planning(
    device: torch.device, gpu: str, timer: Timer, *, shared: bool = False, num_ctas: int = 132
) -> Iterator[DevicePlanTiming]:
    """Time flat_steps(), or with `shared` the tables of SHAPES, and compare each plan with the host's.

    gpu: the device's name, which decides whether limits apply. timer: see graph_timer().
    """
    limited = _LIMITED_GPU in gpu
    if not shared:
        for name, starts, lens in flat_steps():
            step = DeviceStep(planner_for_steps(num_ctas=num_ctas), starts, lens, device)
            decodes = limited and name != "mixed" and lens.shape[0] == _LIMITED_BATCH
            yield _timed("device", name, step, timer, _PLAN_LIMIT_US if decodes else None)
        return
    for context in CONTEXTS:
        step = shared_step(context, device, num_ctas)
        for name, rows in SHAPES.items():
            step.fill(torch.from_numpy(np.ascontiguousarray(rows(context // PAGE))))
            limit = _DETECTION_LIMITS_US[context] if limited else None
            yield _timed("device-shared", name, step, timer, limit)


def graph_timer(device: torch.device, *, replays: int = 50) -> Timer:
    """Return a timer that captures PLANS plans in a graph and times its replays."""
    from fi_backend.benchmarks.cuda.graphs import CapturedGraph

    def times(step: Callable[[], Tensor]) -> list[float]:
        return [us / PLANS for us in CapturedGraph(device, step).times_us(replays)]

    return times


def _timed(where: str, name: str, step: DeviceStep, timer: Timer, limit_us: float | None) -> DevicePlanTiming:
    def plans() -> Tensor:
        for _ in range(PLANS):
            step.plan()
        return step.buffer

    times = timer(plans)
    p10, median, p90 = np.percentile(times, [10, 50, 90]).round(2).tolist()
    planned, host = step.planned(), step.expected()
    same = planned.tobytes() == host.tobytes()
    failed = "" if same else "expected the bytes of the host's plan; got others"
    if not failed and limit_us is not None and median > limit_us:
        failed = f"expected at most {limit_us:g} us; got {median:g}"
    return DevicePlanTiming(
        where=where,
        step=name,
        batch=step.kv_lens.shape[0],
        context=int(step.kv_lens.max()),
        median_us=median,
        p10_us=p10,
        p90_us=p90,
        calls=PLANS * len(times),
        items=planned.header["num_items"],
        prefix_nodes=planned.num_nodes,
        limit_us=limit_us,
        failed=failed,
    )
