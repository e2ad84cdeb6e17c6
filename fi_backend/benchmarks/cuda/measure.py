# SPDX-License-Identifier: Apache-2.0
"""One row of `bench kernels --device cuda`: ours and the peers on the same tensors, in interleaved runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fi_backend.benchmarks.cuda.cases import Case, contiguous
from fi_backend.benchmarks.cuda.exact import Errors, Sample, errors, sample_problem
from fi_backend.benchmarks.cuda.graphs import Captured, Clock
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.errors import UnsupportedError

OURS = "fi"
VARIANTS = ("ragged", "planned_queues", "not_invariant")
METHOD = (
    "Microseconds of one layer: median of graph replays over layers with KV of their own (more than twice "
    "the L2 cache between two uses of a byte), less that of the unrelated 4096 x 4096 product behind each "
    "layer, timed alone in the same way. In each run everyone is measured once, in changing order; figures "
    "are medians over runs. ratio: geometric mean over runs of ours / best peer; ratio_upper95: "
    "exp(mean + t(0.95, runs - 1) sd / sqrt(runs)) of its logarithms. best_peer: the fastest whose rms error "
    "is at most 3 times the row's smallest. Errors: against float64 on sampled rows of a replay that "
    "overwrites NaN."
)
# A peer whose error is more than so many times the smallest of the row computed something else.
_WRONG = 3.0


@dataclass(frozen=True)
class CudaTiming:
    """Microseconds of one layer, and errors against float64 on sampled rows.

    ours_us: median of the runs, None if ours failed. ours_spread: lowest and highest run. floor_us: what the
    ceilings allow. ratio, ratio_upper95: ours to best_peer, see interval.ratio_with_upper_bound. max_err,
    rms_err, peers_max_err, peers_rms_err: None where an element is missing or NaN. variants: other ways of
    ours, each {us, max_err, rms_err}. not_measured: reason by name. wrong: peers that do not count as best.
    bandwidth_share: unique bytes of K, V, queries and outputs a second to the read ceiling; flops_share the
    same for operations. runs: the median of every run by name, spacer_us taken off.
    """

    workload: str
    ours_us: float | None
    ours_spread: tuple[float, float] | None
    peers: dict[str, float]
    floor_us: float
    max_err: float | None
    ratio: float | None
    ratio_upper95: float | None
    best_peer: str | None
    rms_err: float | None
    peers_max_err: dict[str, float | None]
    peers_rms_err: dict[str, float | None]
    bandwidth_share: float | None
    flops_share: float | None
    spacer_us: float
    layers: int
    variants: dict[str, dict[str, float | None]]
    wrong: list[str]
    not_measured: dict[str, str]
    runs: dict[str, list[float]]


@dataclass
class _Contender:
    captured: Captured
    errors: Errors
    times: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        return statistics.median(self.times)


def time_case(
    case: Case,
    problem: Problem,
    peers: Sequence[Peer],
    clock: Clock,
    ceilings: Mapping[str, float],
    *,
    runs: int,
) -> CudaTiming:
    """Check and time a case. In each run everyone is measured once, in an order that changes from run to run.

    Peers that cannot take the problem, or fail, are named in `not_measured`; so are ours.
    """
    layers = len(problem.layers)
    contenders: dict[str, _Contender] = {}
    not_measured: dict[str, str] = {}

    def enter(name: str, subject: Problem, sample: Sample, peer: Peer | None) -> None:
        try:
            run = _ours(subject, name) if peer is None else peer.prepare(subject)
            captured = clock.capture(run, layers)
            contenders[name] = _Contender(captured, _check(captured, sample))
        except UnsupportedError as reason:
            not_measured[name] = str(reason)
        except Exception as error:  # noqa: BLE001 - one implementation's failure is a gap in the row
            not_measured[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    sample = sample_problem(problem, layers - 1)
    enter(OURS, problem, sample, None)
    for name in case.variants:
        subject = contiguous(problem) if name == "ragged" else problem
        other = sample if subject is problem else sample_problem(subject, layers - 1)
        enter(name, subject, other, None)
    for peer in peers:
        enter(peer.name, problem, sample, peer)
    try:
        spacer_us = _interleave(contenders, clock.capture_spacers(layers), layers, runs)
    except RuntimeError as error:
        raise RuntimeError(f"{case.name}: the device failed; before that: {not_measured}") from error
    return _row(case, contenders, not_measured, ceilings, layers, spacer_us)


def _ours(problem: Problem, variant: str) -> Run:
    spec = problem.spec
    if variant == "not_invariant":
        spec = replace(spec, batch_invariant=False)
    qo_indptr, lens = problem.qo_indptr, problem.kv_lens
    attention = BatchAttention(
        spec,
        max_requests=lens.shape[0],
        max_tokens=problem.q.shape[0],
        max_kv_len=int(lens.max()),
        device=problem.q.device,
        planned_queues=variant == "planned_queues",
    )
    if variant == "ragged":
        indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
        indptr[1:] = lens.cumsum(0)
        table = PageTable.ragged(indptr)
        layers = [(key.squeeze(1), value.squeeze(1)) for key, value in problem.layers]
    else:
        table = PageTable.from_block_table(problem.block_table, lens, page_size=spec.page_size)
        layers = problem.layers
    attention.plan(qo_indptr, table, qo_indptr_host=qo_indptr.cpu(), kv_lens_host=lens.cpu())
    out = torch.empty(
        problem.q.shape[0], spec.num_qo_heads, spec.head_dim_v, dtype=problem.q.dtype, device=problem.q.device
    )
    return lambda layer: attention.run(problem.q, *layers[layer], out=out)


def _check(captured: Captured, sample: Sample) -> Errors:
    """Poison the output and let a replay overwrite it: an element that is left out stays NaN."""
    captured.output.fill_(math.nan)
    captured.replay()
    return errors(captured.output, sample)


def _interleave(contenders: Mapping[str, _Contender], spacers: Captured, layers: int, runs: int) -> float:
    """Time everyone `runs` times; return the microseconds of the product that was taken off each layer."""
    names = list(contenders)
    taken_off = []
    for index in range(runs):
        spacer_us = spacers.time_us() / layers
        taken_off.append(spacer_us)
        shift = index % len(names) if names else 0
        order = names[shift:] + names[:shift]
        for name in order if index % 2 == 0 else reversed(order):
            contender = contenders[name]
            contender.times.append(max(contender.captured.time_us() / layers - spacer_us, 0.01))
    return statistics.median(taken_off)


def _row(
    case: Case,
    contenders: dict[str, _Contender],
    not_measured: dict[str, str],
    ceilings: Mapping[str, float],
    layers: int,
    spacer_us: float,
) -> CudaTiming:
    ours = contenders.get(OURS)
    peers = {name: each for name, each in contenders.items() if name not in (OURS, *case.variants)}
    smallest = min((each.errors.rms for each in contenders.values()), default=math.inf)
    # Written so that a smallest error of infinity, everyone wrong, leaves nobody.
    right = {name: each for name, each in peers.items() if each.errors.rms < math.inf}
    right = {name: each for name, each in right.items() if each.errors.rms <= _WRONG * smallest}
    best = min(right, key=lambda name: right[name].us, default=None)
    ratio = upper = None
    if ours is not None and best is not None:
        ratio, upper = ratio_with_upper_bound(ours.times, right[best].times)
    moved = case.workload.kv_bytes(case.spec) + case.workload.io_bytes(case.spec)
    flops = case.workload.flops(case.spec)
    read_us = moved / ceilings["read_gbs"] / 1e3
    product_us = flops / ceilings["matmul_tflops"] / 1e6
    return CudaTiming(
        workload=case.name,
        ours_us=None if ours is None else round(ours.us, 2),
        ours_spread=None if ours is None else (round(min(ours.times), 2), round(max(ours.times), 2)),
        peers={name: round(each.us, 2) for name, each in peers.items()},
        floor_us=round(max(read_us, product_us), 2),
        max_err=None if ours is None else _finite(ours.errors.largest),
        ratio=None if ratio is None else round(ratio, 4),
        ratio_upper95=None if upper is None else round(upper, 4),
        best_peer=best,
        rms_err=None if ours is None else _finite(ours.errors.rms),
        peers_max_err={name: _finite(each.errors.largest) for name, each in peers.items()},
        peers_rms_err={name: _finite(each.errors.rms) for name, each in peers.items()},
        bandwidth_share=None if ours is None else round(read_us / ours.us, 4),
        flops_share=None if ours is None else round(product_us / ours.us, 4),
        spacer_us=round(spacer_us, 2),
        layers=layers,
        variants={
            name: {
                "us": round(contenders[name].us, 2),
                "max_err": _finite(contenders[name].errors.largest),
                "rms_err": _finite(contenders[name].errors.rms),
            }
            for name in case.variants
            if name in contenders
        },
        wrong=[name for name in peers if name not in right],
        not_measured=not_measured,
        runs={name: [round(time, 3) for time in each.times] for name, each in contenders.items()},
    )


def _finite(error: float) -> float | None:
    # JSON has no infinity.
    return error if math.isfinite(error) else None
