# SPDX-License-Identifier: Apache-2.0
"""A row of `bench kernels --device cuda` as it is recorded, and what makes it fail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fi_backend.benchmarks.cuda.cases import Case
from fi_backend.benchmarks.cuda.exact import Errors
from fi_backend.benchmarks.cuda.graphs import Captured
from fi_backend.benchmarks.cuda.ours import PAGE1
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.variant_oracles import ORACLES

OURS = "fi"
# Whoever's error is more than so many times the smallest of the row computed something else.
_WRONG = 3.0
# Rounding weights and outputs to bfloat16 costs less than 2^-8 of the answer's size. Holds ours where no peer
# computes the same.
_OWN_ERROR = 2.0**-6


@dataclass(frozen=True)
class CudaTiming:
    """Microseconds of one layer, and errors against float64 on sampled rows.

    ours_us: median of the runs, None if ours failed. ours_spread: lowest and highest run. floor_us: what the
    ceilings allow. ratio, ratio_upper95: ours to best_peer, see interval.ratio_with_upper_bound; ratios: the
    same to every peer. max_err, rms_err, peers_max_err, peers_rms_err: None where an element is missing or
    NaN. variants: other ways of ours, each {us, max_err, rms_err, ratio, ratio_upper95}, its time to ours.
    not_measured: reason by name. wrong: peers that do not count as best. marked: peers that take something
    else than the problem, and what; they do not count either. failed: why the row does not stand.
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
    ratios: dict[str, tuple[float, float]]
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
    marked: dict[str, str]
    not_measured: dict[str, str]
    failed: list[str]
    runs: dict[str, list[float]]


@dataclass
class Contender:
    """Someone in a row. size: root mean square of the exact answer. mark: see Peer."""

    captured: Captured
    errors: Errors
    size: float
    mark: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def us(self) -> float:
        """Median of the runs."""
        return statistics.median(self.times)


def make_row(
    case: Case,
    contenders: Mapping[str, Contender],
    not_measured: dict[str, str],
    ceilings: Mapping[str, float],
    layers: int,
    spacer_us: float,
    prefix_nodes: int,
) -> CudaTiming:
    """Return the row of a case that has been measured."""
    ours = contenders.get(OURS)
    peers = {name: each for name, each in contenders.items() if name not in (OURS, *case.variants)}
    marked = {name: each.mark for name, each in peers.items() if each.mark}
    right = _right(contenders, peers)
    best = min(right, key=lambda name: right[name].us, default=None)
    ratios = {name: _ratio(ours, each) for name, each in peers.items()} if ours else {}
    ratio, upper = ratios[best] if best is not None and ours else (None, None)
    moved = case.workload.kv_bytes(case.spec) + case.workload.io_bytes(case.spec)
    read_us = moved / ceilings["read_gbs"] / 1e3
    product_us = case.workload.flops(case.spec) / ceilings["matmul_tflops"] / 1e6
    return CudaTiming(
        workload=case.name,
        ours_us=None if ours is None else round(ours.us, 2),
        ours_spread=None if ours is None else (round(min(ours.times), 2), round(max(ours.times), 2)),
        peers={name: round(each.us, 2) for name, each in peers.items()},
        floor_us=round(max(read_us, product_us), 2),
        max_err=None if ours is None else _finite(ours.errors.largest),
        ratio=ratio,
        ratio_upper95=upper,
        best_peer=best,
        ratios=ratios,
        rms_err=None if ours is None else _finite(ours.errors.rms),
        peers_max_err={name: _finite(each.errors.largest) for name, each in peers.items()},
        peers_rms_err={name: _finite(each.errors.rms) for name, each in peers.items()},
        bandwidth_share=None if ours is None else round(read_us / ours.us, 4),
        flops_share=None if ours is None else round(product_us / ours.us, 4),
        spacer_us=round(spacer_us, 2),
        layers=layers,
        prefix_nodes=prefix_nodes,
        variants={name: _way(contenders[name], ours) for name in case.variants if name in contenders},
        wrong=[name for name in peers if name not in right and name not in marked],
        marked=marked,
        not_measured=not_measured,
        failed=_failures(case, contenders, right, not_measured, prefix_nodes),
        runs={name: [round(time, 3) for time in each.times] for name, each in contenders.items()},
    )


def summary(rows: Sequence[CudaTiming]) -> dict[str, Any]:
    """Return what a record says of all its rows.

    failed: reasons by row. page1: times in pages of one token to those of the row, and attention_variants:
    times of variants of attention to plain attention, each as [ratio, upper 95 % bound].
    """

    def of_ways(row: CudaTiming, names: Sequence[str]) -> dict[str, list[float | None]]:
        found = ((name, row.variants[name]) for name in names if name in row.variants)
        return {name: [each["ratio"], each["ratio_upper95"]] for name, each in found}

    pages = {row.workload: of_ways(row, [PAGE1]).get(PAGE1) for row in rows}
    functors = {row.workload: of_ways(row, list(ORACLES)) for row in rows}
    return {
        "rows": len(rows),
        "failed": {row.workload: row.failed for row in rows if row.failed},
        "page1": {name: found for name, found in pages.items() if found},
        "attention_variants": {name: found for name, found in functors.items() if found},
    }


def _right(contenders: Mapping[str, Contender], peers: Mapping[str, Contender]) -> dict[str, Contender]:
    """Return the peers whose answer is that of the problem, by the smallest error among those and ours."""
    plain = {name: each for name, each in peers.items() if not each.mark}
    same = [each for name, each in contenders.items() if name in (OURS, *plain)]
    smallest = min((each.errors.rms for each in same), default=math.inf)
    # Written so that a smallest error of infinity, everyone wrong, leaves nobody.
    right = {name: each for name, each in plain.items() if each.errors.rms < math.inf}
    return {name: each for name, each in right.items() if each.errors.rms <= _WRONG * smallest}


def _failures(
    case: Case,
    contenders: Mapping[str, Contender],
    right: Mapping[str, Contender],
    not_measured: Mapping[str, str],
    prefix_nodes: int,
) -> list[str]:
    found = []
    for name in (OURS, *case.variants):
        if name not in contenders:
            found.append(f"{name}: {not_measured.get(name, 'not measured')}")
        elif not contenders[name].errors.rms < math.inf:
            found.append(f"{name}: elements of its output are missing, NaN or infinite")
        elif contenders[name].errors.rms > (most := _OWN_ERROR * contenders[name].size):
            found.append(f"{name}: rms error {contenders[name].errors.rms:.2e}; expected at most {most:.2e}")
    if OURS in contenders and right:
        most = _WRONG * min(each.errors.rms for each in right.values())
        if most < contenders[OURS].errors.rms < math.inf:
            found.append(
                f"{OURS}: rms error {contenders[OURS].errors.rms:.2e}; expected at most {_WRONG:g} times the "
                f"smallest of the peers, {most:.2e}"
            )
    if case.workload.prefixes and not prefix_nodes and OURS in contenders:
        found.append(f"{OURS}: expected prefix nodes in the plan of requests that share prefixes; got 0")
    return found


def _way(way: Contender, ours: Contender | None) -> dict[str, float | None]:
    ratio, upper = _ratio(way, ours) if ours else (None, None)
    return {
        "us": round(way.us, 2),
        "max_err": _finite(way.errors.largest),
        "rms_err": _finite(way.errors.rms),
        "ratio": ratio,
        "ratio_upper95": upper,
    }


def _ratio(one: Contender, other: Contender) -> tuple[float, float]:
    ratio, upper = ratio_with_upper_bound(one.times, other.times)
    return round(ratio, 4), round(upper, 4)


def _finite(error: float) -> float | None:
    # JSON has no infinity.
    return error if math.isfinite(error) else None
