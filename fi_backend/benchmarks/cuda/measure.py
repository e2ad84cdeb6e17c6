# SPDX-License-Identifier: Apache-2.0
"""One row of `bench kernels --device cuda`: ours and the peers on the same tensors, in interleaved runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fi_backend.benchmarks.cuda.cases import Case, contiguous
from fi_backend.benchmarks.cuda.exact import Errors, Sample, errors, sample_problem
from fi_backend.benchmarks.cuda.graphs import Captured, Clock
from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.peers import Peer, Problem
from fi_backend.errors import UnsupportedError

OURS = "fi"
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
    same for operations. prefix_nodes: shared prefixes that ours read once for all members.
    runs: the median of every run by name, spacer_us taken off.
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
    prefix_nodes: int
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
    nodes: dict[str, int] = {}

    def enter(name: str, subject: Problem, sample: Sample, peer: Peer | None) -> None:
        try:
            if peer is None:
                run, nodes[name] = prepare_ours(subject, name)
            else:
                run = peer.prepare(subject)
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
    return _row(case, contenders, not_measured, ceilings, layers, spacer_us, nodes.get(OURS, 0))


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
    prefix_nodes: int,
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
        prefix_nodes=prefix_nodes,
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
