# SPDX-License-Identifier: Apache-2.0
"""Decoding behind shared prefixes, with and without sharing, over a grid of batches.

    python benchmarks/kernels/prefix_grid.py [--json FILE] [--runs 3]

Asks whether a planner that decides by itself ever makes a step slower than its flat plan: both are measured
in one process on the same tensors. Where the planner keeps no prefix the two plans have equal bytes, and
nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fi_backend.benchmarks.cuda.cases import Case, layers_for, make_problem
from fi_backend.benchmarks.cuda.exact import errors, sample_problem
from fi_backend.benchmarks.cuda.graphs import GraphClock
from fi_backend.benchmarks.cuda.ours import FLAT, prepare_ours
from fi_backend.benchmarks.peers import SharedPrefix
from fi_backend.benchmarks.record import gpu_provenance
from fi_backend.benchmarks.workloads import Workload

PREFIXES = (64, 256, 1024, 4096, 8192, 32768)
MEMBERS = (2, 8, 32, 64, 256)
SUFFIXES = (64, 512, 4096)
# Keys that a layer may hold: two layers and more have to fit beside each other.
MAX_KEYS = 1 << 20
LIMIT = 1.02


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the record to")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--budget-us", type=float, default=12_000.0, help="of replays, for each figure")
    chosen = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    record: dict[str, Any] = {**gpu_provenance(device), "runs": chosen.runs, "rows": []}
    for batch in batches():
        row = measure(batch, device, chosen.runs, chosen.budget_us)
        record["rows"].append(row)
        line = f"{row['workload']:<42} {row['prefix_nodes']:>3} nodes"
        if row["prefix_nodes"]:
            line += f"  {row['ours_us']:8.1f} us, flat {row['flat_us']:8.1f}, {row['ratio']:.3f}"
        print(line, flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps(record, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    slower = [row["workload"] for row in record["rows"] if row["prefix_nodes"] and row["ratio"] > LIMIT]
    print(f"{len(slower)} of {len(record['rows'])} batches slower than {LIMIT} x flat: {slower}")


class Batch(NamedTuple):
    """A batch of decoding requests, all of which share their first `common` tokens."""

    case: Case
    common: int = 0


def batches() -> Iterator[Batch]:
    """Yield one group of every size, then several groups and two levels."""
    for prefix in PREFIXES:
        for members in MEMBERS:
            for suffix in SUFFIXES:
                if prefix + members * suffix <= MAX_KEYS:
                    yield Batch(_case(f"{members}x({prefix}+{suffix})", 1, members, prefix, suffix))
    for groups, members in ((2, 4), (4, 16), (16, 4), (64, 2)):
        for prefix, suffix in ((256, 128), (2048, 256), (8192, 1024)):
            if groups * (prefix + members * suffix) <= MAX_KEYS:
                name = f"{groups} groups of {members}x({prefix}+{suffix})"
                yield Batch(_case(name, groups, members, prefix, suffix))
    for groups, members in ((4, 4), (8, 8)):
        for common, prefix, suffix in ((512, 256, 128), (4096, 1024, 256)):
            name = f"{common} before {groups} groups of {members}x({prefix}+{suffix})"
            yield Batch(_case(name, groups, members, common + prefix, suffix), common)


def _case(name: str, groups: int, members: int, prefix: int, suffix: int) -> Case:
    requests = groups * members
    prefixes = tuple(SharedPrefix(prefix, first, first + members) for first in range(0, requests, members))
    return Case(Workload(name, (1,) * requests, (prefix + suffix,) * requests, prefixes))


def measure(batch: Batch, device: torch.device, runs: int, budget_us: float) -> dict[str, Any]:
    """Return the row of a batch: how many nodes are kept, medians of both ways, and the error of ours."""
    case = batch.case
    layers = layers_for(case, torch.cuda.get_device_properties(device).L2_cache_size)
    problem = make_problem(case, layers=layers, device=device)
    shared = batch.common // case.spec.page_size
    problem.block_table[:, :shared] = problem.block_table[0, :shared]
    ours = prepare_ours(problem)
    row: dict[str, Any] = {"workload": case.name, "prefix_nodes": ours.prefix_nodes}
    if not ours.prefix_nodes:
        return row
    clock = GraphClock(device, layers, budget_us)
    ways = {
        "ours": clock.capture(ours.run, layers),
        "flat": clock.capture(prepare_ours(problem, FLAT).run, layers),
    }
    spacers = clock.capture_spacers(layers)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs):
        spacer = spacers.time_us()
        for name in ways if run % 2 else reversed(ways):
            times[name].append((ways[name].time_us() - spacer) / layers)
    found = errors(ways["ours"].output, sample_problem(problem, layers - 1))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        **row,
        "ours_us": round(medians["ours"], 2),
        "flat_us": round(medians["flat"], 2),
        "ratio": round(medians["ours"] / medians["flat"], 4),
        "rms_err": found.rms,
        "runs": {name: [round(each, 2) for each in values] for name, values in times.items()},
    }


if __name__ == "__main__":
    main()
