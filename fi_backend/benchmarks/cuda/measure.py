# SPDX-License-Identifier: Apache-2.0
"""One row of `bench kernels --device cuda`: ours and the peers on the same tensors, in interleaved runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from fi_backend.benchmarks.cuda.cases import Case
from fi_backend.benchmarks.cuda.exact import Errors, Sample, errors, sample_problem
from fi_backend.benchmarks.cuda.graphs import Captured, Clock
from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.cuda.row import OURS, Contender, CudaTiming, make_row
from fi_backend.benchmarks.cuda.ways import enter_way
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.benchmarks.record import without_folders
from fi_backend.errors import UnsupportedError

METHOD = (
    "Microseconds of one layer: median of graph replays, behind 20 ms of its own that do not count, over "
    "layers with KV of their own (more than twice the L2 cache between two uses of a byte), less that of "
    "the unrelated 4096 x 4096 product behind each layer, timed alone in the same way. In each run "
    "everyone is measured once, in changing order; figures are medians over runs. ratio: geometric mean "
    "over runs of ours / best peer; ratio_upper95: exp(mean + t(0.95, runs - 1) sd / sqrt(runs)) of its "
    "logarithms. best_peer: the fastest whose rms error is at most 3 times the row's smallest, and which "
    "takes the problem as it stands. Errors: against float64 on sampled rows of a replay that overwrites "
    "NaN."
)


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
    contenders: dict[str, Contender] = {}
    not_measured: dict[str, str] = {}
    nodes = 0

    def enter(name: str, prepare: Callable[[], tuple[Run, Sample]], mark: str = "") -> None:
        try:
            run, sample = prepare()
            captured = clock.capture(run, layers)
            contenders[name] = Contender(captured, _check(captured, sample), sample.rms, mark)
        except UnsupportedError as reason:
            not_measured[name] = str(reason)
        except Exception as error:  # noqa: BLE001 - one implementation's failure is a gap in the row
            said = without_folders(" ".join(str(error).split()))
            not_measured[name] = f"{type(error).__name__}: {said[:300]}"

    sample = sample_problem(problem, layers - 1)

    def prepare_plain() -> tuple[Run, Sample]:
        nonlocal nodes
        run, nodes = prepare_ours(problem)
        return run, sample

    def prepare_way(name: str) -> tuple[Run, Sample]:
        way = enter_way(name, problem, sample)
        return way.prepared.run, way.sample

    enter(OURS, prepare_plain)
    for name in case.variants:
        enter(name, lambda name=name: prepare_way(name))  # type: ignore[misc]
    for peer in peers:
        enter(peer.name, lambda peer=peer: (peer.prepare(problem), sample), peer.mark)  # type: ignore[misc]
    try:
        spacer_us = interleave(contenders, clock.capture_spacers(layers), layers, runs)
    except RuntimeError as error:
        raise RuntimeError(f"{case.name}: the device failed; before that: {not_measured}") from error
    return make_row(case, contenders, not_measured, ceilings, layers, spacer_us, nodes)


def _check(captured: Captured, sample: Sample) -> Errors:
    """Poison the output and let a replay overwrite it: an element that is left out stays NaN."""
    captured.output.fill_(math.nan)
    captured.replay()
    return errors(captured.output, sample)


def interleave(contenders: Mapping[str, Contender], spacers: Captured, layers: int, runs: int) -> float:
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
