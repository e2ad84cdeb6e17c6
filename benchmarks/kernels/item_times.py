# SPDX-License-Identifier: Apache-2.0
"""Where the warps of one launch of attention are when: item by item, what they wait for and what they do.

    python benchmarks/kernels/item_times.py --only dec_const_16,pre_const --way FI_PDL=0

Compiles attention with the define FI_MARKS=1, under which the first lane of every warp notes the time at
every FI_MARK(control, "name") of the kernel (csrc/sm80/marks.cuh); rows are those of `fi-backend bench
kernels --device cuda`, replayed as there. Of the last layer's launch it prints, in microseconds since its
first CTA began, the median over CTAs with the least and the greatest, for one warp of each role and the first
items of each CTA.

Marks cost time and registers: a small batch takes 5 % longer with them.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from compare_defines import measured_rows, parse_way, with_defines
from plan_phases import phase_id

from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.cuda.tables import TABLES
from fi_backend.core import jit, kernels
from fi_backend.core.jit.arch import cuda_arch

_CTAS, _WARPS, _MARKS = 132, 12, 64  # of csrc/sm80/marks.cuh
_MARK = np.dtype([("id", "<u4"), ("clock", "<u4"), ("time_ns", "<u8")])
ROLES = {"first consumer": 0, "last consumer": 7, "producer": 8, "scheduler": 10}
BEGINS = (
    "item",
    "drawn",
    "rows of the first tile",
)  # marks that a role passes once an item, before the others

Times = dict[tuple[int, str], list[float]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", default="targets", choices=TABLES)
    parser.add_argument("--only", default="", help="parts of the names of rows, separated by commas")
    parser.add_argument("--way", default="", help="DEFINE=VALUE,... of the kernel")
    parser.add_argument("--items", type=int, default=3, help="how many of each CTA's items are printed")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device to measure on; torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    with_defines("marks", {**parse_way(f":{chosen.way}")[1], "FI_MARKS": "1"})
    for row, problem, clock in measured_rows(chosen.table, chosen.only, device):
        layers = len(problem.layers)
        graph = clock.capture(prepare_ours(problem).run, layers)
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize(device)
        module = kernels.cuda_attention_module(problem.spec, cuda_arch(device))
        marks = read_marks(ctypes.CDLL(str(jit.build_all([module])[0])))
        print(
            f"\n{row.name}: {graph.time_us() / layers:.1f} us a layer, with marks and the product behind it"
        )
        for role, warp in ROLES.items():
            print_role(role, times_of(marks[:, warp], launched_ns(marks), mark_names()), chosen.items)
        del problem, graph  # before the next one is made


def read_marks(library: ctypes.CDLL) -> npt.NDArray[np.void]:
    """Return the marks of the last launch, of _MARK by CTA, warp and number. Raises RuntimeError."""
    marks = np.zeros((_CTAS, _WARPS, _MARKS), dtype=_MARK)
    error = library.fi_read_marks(ctypes.c_void_p(marks.ctypes.data))
    if error:
        raise RuntimeError(f"fi_read_marks: expected the marks of a launch; got CUDA error {error}")
    return marks


def mark_names() -> dict[int, str]:
    """Return the names of marks in the kernel's sources by their ids."""
    text = "".join(path.read_text() for path in sorted(Path(jit.csrc_root(), "sm80").glob("*.cuh")))
    return {phase_id(name): name for name in re.findall(r'FI_MARK\(control, "([^"]+)"\)', text)}


def launched_ns(marks: npt.NDArray[np.void]) -> int:
    """Return when the first warp of the launch began."""
    first = marks[:, :, 0]
    return int(first["time_ns"][first["id"] != 0].min())


def times_of(marks: npt.NDArray[np.void], launched: int, names: Mapping[int, str]) -> Times:
    """Return the microseconds since the launch at which one warp of each CTA passed each mark of each item.

    marks: of _MARK by CTA and number, ended by an id of 0. Within a warp times are told by its clock, whose
    steps are finer, at the rate that all of its CTAs' spans give. Items count from 0; -1: before the first.
    """
    passed = [cta[: int(np.argmin(cta["id"] != 0))] for cta in marks]
    passed = [cta for cta in passed if len(cta) > 1]
    spans = [(int(cta["time_ns"][-1] - cta["time_ns"][0]), _cycles(cta)[-1]) for cta in passed]
    cycles = sum(span[1] for span in spans)
    ns_a_cycle = sum(span[0] for span in spans) / cycles if cycles else 0.0
    times: Times = {}
    for cta in passed:
        begin = (int(cta["time_ns"][0]) - launched) / 1000
        item = -1
        for mark, cycle in zip(cta["id"].tolist(), _cycles(cta), strict=True):
            name = names.get(mark, hex(mark))
            item += name in BEGINS
            times.setdefault((item, name), []).append(begin + cycle * ns_a_cycle / 1000)
    return times


def _cycles(cta: npt.NDArray[np.void]) -> list[int]:
    # Differences of 32 bits are right whether the clock wrapped or not.
    return (cta["clock"] - cta["clock"][0]).astype(np.uint32).tolist()


def print_role(role: str, times: Times, items: int) -> None:
    """Print the marks of the first items in the order in which they are passed."""
    print(f"  {role}")
    order = sorted(times, key=lambda key: (key[0], statistics.median(times[key])))
    for item, name in order:
        if item < items:
            found = times[item, name]
            spread = f"{min(found):.2f} to {max(found):.2f}, {len(found)} CTAs"
            print(f"    item {item:2d}  {name:<24}{statistics.median(found):8.2f}  ({spread})")


if __name__ == "__main__":
    main()
