# SPDX-License-Identifier: Apache-2.0
"""Our CPU executor beside its peers: same numbers, same threads, one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.benchmarks.workloads import Workload, make_problem
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError

OURS = "fi"


@dataclass(frozen=True)
class KernelTiming:
    """Microseconds of one layer of a workload.

    ours_spread: lowest and highest median of a round. peers: by name. floor_us: what the ceilings allow.
    max_err, peers_max_err: largest difference from float64. tokens_per_s, gbs: of ours; query tokens, and
    bytes of K and V that have to be read.
    """

    workload: str
    ours_us: float
    ours_spread: tuple[float, float]
    peers: dict[str, float]
    floor_us: float
    max_err: float
    peers_max_err: dict[str, float]
    tokens_per_s: float
    gbs: float
    layers: int


def time_kernels(
    workload: Workload,
    spec: AttentionSpec,
    peers: Sequence[Peer],
    ceilings: Mapping[str, float],
    *,
    rounds: int = 5,
    passes: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> KernelTiming:
    """Measure a workload: in each round every implementation runs all layers `passes` times, in turn.

    progress is called after each round. Peers that cannot take the problem are left out.
    """
    problem = make_problem(workload, spec)
    runs: dict[str, Run] = {OURS: _ours(problem)}
    for peer in peers:
        try:
            runs[peer.name] = peer.prepare(problem)
        except UnsupportedError:
            continue
    exact = exact_attention(problem, 0)
    errors = {
        name: float((run(0).double() - exact).abs().nan_to_num(torch.inf).max()) for name, run in runs.items()
    }

    medians: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        # Every other round in reverse, so that a drift of the clock favours nobody.
        names = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in names:
            medians[name].append(_median_us(runs[name], len(problem.layers), passes))
        progress()
    ours = statistics.median(medians[OURS])
    kv_bytes = workload.kv_bytes(spec)
    floor_s = max(
        kv_bytes / (ceilings["read_gbs"] * 1e9), workload.flops(spec) / (ceilings["matmul_tflops"] * 1e12)
    )
    return KernelTiming(
        workload=workload.name,
        ours_us=round(ours, 1),
        ours_spread=(round(min(medians[OURS]), 1), round(max(medians[OURS]), 1)),
        peers={name: round(statistics.median(values), 1) for name, values in medians.items() if name != OURS},
        floor_us=round(floor_s * 1e6, 1),
        max_err=errors[OURS],
        peers_max_err={name: error for name, error in errors.items() if name != OURS},
        tokens_per_s=round(workload.tokens / ours * 1e6, 1),
        gbs=round(kv_bytes / ours / 1e3, 2),
        layers=len(problem.layers),
    )


def _ours(problem: Problem) -> Run:
    attention = BatchAttention(
        problem.spec,
        max_requests=problem.kv_lens.shape[0],
        max_tokens=problem.q.shape[0],
        max_kv_len=int(problem.kv_lens.max()),
    )
    table = PageTable.from_block_table(problem.block_table, problem.kv_lens, page_size=problem.spec.page_size)
    attention.plan(problem.qo_indptr, table)
    # A kernel that leaves an element out leaves a NaN.
    out = torch.full_like(problem.q, float("nan"))
    return lambda layer: attention.run(problem.q, *problem.layers[layer], out=out)


def _median_us(run: Run, layers: int, passes: int) -> float:
    times = []
    for _ in range(passes):
        for layer in range(layers):
            begin = time.perf_counter_ns()
            run(layer)
            times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000
