# SPDX-License-Identifier: Apache-2.0
"""Variants of a kernel, each a set of defines, beside each other and their peers in one process.

    python benchmarks/kernels/compare_defines.py --only pre_1x8k,dec_const \\
        --way now --way taller:FI_TILE=256,FI_STAGES=3 --way mma:kernel=mma --peers fa3,flashinfer-decode

`kernel` is no define but one of fi_backend.core.kernel_choice's, `variant` a shipped variant of attention,
and costs.NAME=INT a field of CostModel, such as costs.overlap=1.

For the time of tuning: a define that the sources do not know yet changes nothing but the module's name. Rows
and peers are those of `fi-backend bench kernels --device cuda`.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fi_backend.benchmarks.cuda import cases
from fi_backend.benchmarks.cuda.exact import Errors, Sample, errors, sample_problem
from fi_backend.benchmarks.cuda.fa3 import use_library
from fi_backend.benchmarks.cuda.graphs import CapturedGraph, GraphClock
from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.cuda.tables import TABLES
from fi_backend.benchmarks.cuda.ways import variant_arguments
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.benchmarks.variant_oracles import ORACLES
from fi_backend.cli.bench_choice import available_peers, chosen_by_name
from fi_backend.core import kernels
from fi_backend.core.jit import ModuleSpec
from fi_backend.core.planner import CostModel

Defines = dict[str, str]


def main() -> None:
    """Measure and print a line a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", default="targets", choices=TABLES)
    parser.add_argument("--only", default="", help="parts of the names of rows, separated by commas")
    parser.add_argument("--way", action="append", default=[], help="NAME or NAME:DEFINE=VALUE,...; repeated")
    parser.add_argument("--peers", default="fa3", help="names separated by commas; 'none' for none")
    parser.add_argument("--fa3-library", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device to measure on; torch sees none")
    if chosen.fa3_library:
        use_library(chosen.fa3_library)
    device = torch.device("cuda", torch.cuda.current_device())
    peers = [] if chosen.peers == "none" else available_peers("cuda", chosen.peers)[0]
    for row, problem, clock in measured_rows(chosen.table, chosen.only, device):
        layers = len(problem.layers)
        found = enter_all(row, problem, chosen.way or ["now"], peers, clock)
        times = interleaved({name: each.captured for name, each in found.items()}, clock, layers, chosen.runs)
        line = "  ".join(f"{name} {times[name]:.1f} ({each.errors.rms:.1e})" for name, each in found.items())
        print(f"{row.name:<30}{line}", flush=True)
        del problem, found  # before the next one is made


def measured_rows(
    table: str, only: str, device: torch.device
) -> Iterator[tuple[cases.Case, Problem, GraphClock]]:
    """Make the problems of the rows of a table whose names contain one of the texts in `only`, one by one."""
    rows = chosen_by_name(TABLES[table](), only)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    clock = GraphClock(device, max(cases.layers_for(row, cache) for row in rows))
    for row in rows:
        yield row, cases.make_problem(row, layers=cases.layers_for(row, cache), device=device), clock
        gc.collect()
        torch.cuda.empty_cache()


class Entered(NamedTuple):
    """A captured step and how far it lies from float64."""

    captured: CapturedGraph
    errors: Errors


def enter_all(
    row: cases.Case, problem: Problem, ways: Sequence[str], peers: Sequence[Peer], clock: GraphClock
) -> dict[str, Entered]:
    """Capture every way and every peer, and check what a replay writes over NaN."""
    layers = len(problem.layers)
    sample = sample_problem(problem, layers - 1)
    found: dict[str, Entered] = {}

    def enter(name: str, run: Run, sample: Sample = sample) -> None:
        captured = clock.capture(run, layers)
        captured.output.fill_(float("nan"))
        captured.replay()
        found[name] = Entered(captured, errors(captured.output, sample))

    for name, defines in map(parse_way, ways):
        kernel, costs = defines.pop("kernel", None), costs_of(defines, problem.q.device)
        variant = defines.pop("variant", "")
        with_defines(name, defines)
        if variant:
            arguments = variant_arguments(variant, problem)
            exact = sample_problem(problem, layers - 1, (ORACLES[variant], arguments))
            enter(name, prepare_ours(problem, variant, arguments, kernel=kernel, costs=costs).run, exact)
        else:
            enter(name, prepare_ours(problem, kernel=kernel, costs=costs).run)
    for peer in peers:
        try:
            enter(peer.name, peer.prepare(problem))
        except Exception as error:  # noqa: BLE001 - a peer that cannot take the row is left out
            print(f"{row.name}: {peer.name}: {type(error).__name__}: {str(error)[:100]}")
    return found


def parse_way(text: str) -> tuple[str, Defines]:
    """Return the name and the defines of `--way`."""
    name, _, rest = text.partition(":")
    return name, dict(each.split("=", 1) for each in rest.split(",") if each)


def costs_of(defines: Defines, device: torch.device) -> CostModel:
    """Take what is said of costs out of `defines` and return the model that follows from it."""
    usual = CostModel.for_device(device)
    changed = {key: int(defines.pop(key)) for key in list(defines) if key.startswith("costs.")}
    fields = {key.removeprefix("costs."): value for key, value in changed.items()}
    return replace(usual, **{key: type(getattr(usual, key))(value) for key, value in fields.items()})


_plain = kernels.cuda_attention_module


def with_defines(name: str, defines: Defines) -> None:
    """Compile attention with these defines from here on."""

    def module(*arguments: Any) -> ModuleSpec:
        plain = _plain(*arguments)
        kept = tuple((key, value) for key, value in plain.defines if key not in defines)
        return (
            replace(plain, name=f"{plain.name}_{name}", defines=(*kept, *defines.items()))
            if defines
            else plain
        )

    kernels.cuda_attention_module = module


def interleaved(
    graphs: dict[str, CapturedGraph], clock: GraphClock, layers: int, runs: int
) -> dict[str, float]:
    """Return the median microseconds of a layer, each measured once a run."""
    spacers = clock.capture_spacers(layers)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for run in range(runs):
        spacer = spacers.time_us()
        for name in graphs if run % 2 else reversed(graphs):
            times[name].append((graphs[name].time_us() - spacer) / layers)
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


if __name__ == "__main__":
    main()
