# SPDX-License-Identifier: Apache-2.0
"""Where the time of one launch of the share planner goes: detection of prefixes and the plan.

    python benchmarks/kernels/plan_phases.py --only "one prompt,groups,four levels" --context 4096

Compiles the device planner with the define FI_PHASES=1, under which the first thread of the launch's first
two blocks notes the time at every FI_PHASE(block, "name") and behind every barrier of the block
(csrc/core/phases.h). Steps are those of `fi_backend.benchmarks.cuda.plan_time`, replayed as there in a graph
of twenty plans; the last one's marks are read after each replay.

Prints the median microseconds of each phase, a line a mark, of block 0 and of block 1, which ends with the
search: since the mark before, and since the block began. Barriers are numbered behind the name before them.
At the top stands what a plan takes by the graph, without marks and with them: what is missing to block 0's
last mark is the launch, what lies between the two is what marks cost.
"""

from __future__ import annotations

import argparse
import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from fi_backend.benchmarks.cuda.graphs import CapturedGraph
from fi_backend.benchmarks.cuda.plan_time import PLANS, DeviceStep, shared_step
from fi_backend.benchmarks.shared_tables import PAGE, SHAPES
from fi_backend.core import jit, planner
from fi_backend.core.jit.arch import cuda_arch

_BLOCKS, _MARKS = 2, 128  # kPhaseBlocks, kMostPhases + 1 of csrc/cuda/phases.cuh
_MARK = np.dtype([("id", "<u4"), ("time_ns", "<u4"), ("clock", "<u8")])
_BARRIER = 0
_plain_module = planner.cuda_module


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of tables of SHAPES, separated by commas")
    parser.add_argument("--context", type=int, default=4096, help="KV tokens a request")
    parser.add_argument("--replays", type=int, default=50)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device to measure on; torch sees none")
    names = [name.strip() for name in chosen.only.split(",") if name.strip()] or list(SHAPES)
    if unknown := set(names) - set(SHAPES):
        parser.error(f"--only: expected names of {', '.join(SHAPES)}; got {', '.join(sorted(unknown))}")
    device = torch.device("cuda", torch.cuda.current_device())
    plain = shared_step(chosen.context, device)
    planner.cuda_module = marked_module
    marked = shared_step(chosen.context, device)
    library = ctypes.CDLL(str(jit.build_all([marked_module(cuda_arch(device))])[0]))
    for name in names:
        rows = torch.from_numpy(np.ascontiguousarray(SHAPES[name](chosen.context // PAGE)))
        for step in (plain, marked):
            step.fill(rows)
        whole = float(np.median(captured(plain, device).times_us(chosen.replays))) / PLANS
        graph = captured(marked, device)
        with_marks = float(np.median(graph.times_us(chosen.replays))) / PLANS
        samples = []
        for _ in range(chosen.replays):
            graph.replay()
            torch.cuda.synchronize(device)
            samples.append(read_marks(library))
        print(f"\n{name}, {chosen.context}: {whole:.2f} us a plan, {with_marks:.2f} with marks")
        for block in range(_BLOCKS):
            print_block(block, [sample[block] for sample in samples])


def marked_module(arch: str) -> jit.ModuleSpec:
    """Return the planner's module with marks."""
    spec = _plain_module(arch)
    return replace(spec, name=f"{spec.name}_phases", defines=(*spec.defines, ("FI_PHASES", "1")))


def captured(step: DeviceStep, device: torch.device) -> CapturedGraph:
    """Return a graph of PLANS plans of the step."""

    def plans() -> torch.Tensor:
        for _ in range(PLANS):
            step.plan()
        return step.buffer

    return CapturedGraph(device, plans)


def read_marks(library: ctypes.CDLL) -> list[npt.NDArray[np.void]]:
    """Return the marks of the last launch, of each block an array of _MARK. Raises RuntimeError."""
    marks = np.zeros((_BLOCKS, _MARKS), dtype=_MARK)
    error = library.fi_read_phases(ctypes.c_void_p(marks.ctypes.data))
    if error:
        raise RuntimeError(f"fi_read_phases: expected the marks of a launch; got CUDA error {error}")
    return [block[1 : 1 + int(block[0]["clock"])] for block in marks]


def mark_names() -> dict[int, str]:
    """Return the names of marks in the sources by their phase_id()."""
    names = {phase_id(name): name for name in ("launched", "end")}
    for path in sorted(jit.csrc_root().rglob("*.*h")):
        for name in re.findall(r'FI_PHASE\(\w+, "([^"]+)"\)', path.read_text()):
            names[phase_id(name)] = name
    return names


def phase_id(name: str) -> int:
    """Return phase_id() of csrc/core/phases.h."""
    value = 0x811C9DC5
    for byte in name.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


def print_block(block: int, samples: Sequence[npt.NDArray[np.void]]) -> None:
    """Print the medians of one block over those samples that passed the marks that most passed."""
    paths = [tuple(sample["id"].tolist()) for sample in samples]
    path = max(set(paths), key=paths.count)
    kept = [sample for sample, own in zip(samples, paths, strict=True) if own == path]
    if len(path) < 2:
        return
    clocks = np.array([sample["clock"] for sample in kept]).astype(np.int64)
    times = np.array([sample["time_ns"] for sample in kept])
    # Differences of 32 bits are right whether the counter wrapped or not.
    spans_ns = (times[:, -1] - times[:, 0]).astype(np.uint32).astype(np.float64)
    cycles_per_us = 1000 * float(np.sum(clocks[:, -1] - clocks[:, 0]) / np.sum(spans_ns))
    since_begin = np.median(clocks - clocks[:, :1], axis=0) / cycles_per_us
    each = np.median(np.diff(clocks, axis=1), axis=0) / cycles_per_us
    print(f"  block {block}: {len(kept)} of {len(samples)} samples, {cycles_per_us / 1000:.2f} GHz")
    names, last, barriers = mark_names(), "launched", 0
    for mark, (at, took) in enumerate(zip(since_begin[1:], each, strict=True), start=1):
        if path[mark] == _BARRIER:
            barriers += 1
            label = f"  barrier {barriers} behind {last!r}"
        else:
            last, barriers = names.get(path[mark], hex(path[mark])), 0
            label = last
        print(f"    {took:7.2f} {at:7.2f}  {label}")


if __name__ == "__main__":
    main()
