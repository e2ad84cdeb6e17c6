# SPDX-License-Identifier: Apache-2.0
"""What windows and masks of blocks save: their time beside that of the work which is left.

    python benchmarks/kernels/sparse_cost.py [--device cpu|cuda] [--json FILE]

A window of 1024 keys over a context of 65536 beside a context of 1024, decoding; one block of ten chosen
beside all blocks, one mask for all heads and one for each KV head. Pages left of the window do not exist:
their ids are -1. Figures are taken in turn, so that what slows the machine slows both. On the CPU they are
the processor time of one thread, in which other programs do not count. On a GPU they are those of one layer
of a captured step, as `fi-backend bench kernels` takes them: layers have keys and values of their own, more
bytes than its L2 cache holds, and an unrelated product stands behind each. Exits with 1 if an upper bound is
over its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fi_backend import AttentionSpec, BatchAttention, BlockSparseAttention, PageTable
from fi_backend.benchmarks.cuda.cases import rotated_layers
from fi_backend.benchmarks.cuda.graphs import Clock, GraphClock
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.peers import Run
from fi_backend.benchmarks.record import gpu_provenance, provenance
from fi_backend.benchmarks.step_clock import step_clock
from fi_backend.cli.probes.host import cpu_name

WINDOW, CONTEXT, PAGE, BLOCK = 1024, 65536, 16, 64
LIMITS = {"window": 1.15, "blocks": 0.15}


class Case(NamedTuple):
    """Two steps over the same layers, each a function of the layer's number."""

    sparse: Run
    plain: Run
    layers: int


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=9, help="pairs of figures")
    parser.add_argument("--json", type=Path, help="file to write the record to")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a device that torch can use; got cuda, and torch sees none")
    device = torch.device(chosen.device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    record: dict[str, Any] = gpu_provenance(device) if device.type == "cuda" else provenance(cpu_name())
    record |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "rows": []}
    large = device.type == "cuda"
    cache = torch.cuda.get_device_properties(device).L2_cache_size if large else 0
    cases = {f"window, batch {n}": windows(n, device, cache) for n in ((8, 64) if large else (1, 8))}
    rows, cols = (4096, 16384) if large else (1024, 4096)
    for heads, name in ((1, "one mask"), (2, "a mask of each KV head")):
        cases[f"blocks {rows} x {cols}, {name}"] = blocks(rows, cols, heads, device, cache)
    for name, case in cases.items():
        clock = GraphClock(device, case.layers) if large else None
        row = {"case": name, "layers": case.layers, **compare(case, clock, chosen.runs)}
        row["limit"] = LIMITS[name.split(",")[0].split()[0]]
        record["rows"].append(row)
        print(
            f"{name:<42} {row['sparse_us']:10.1f} us, plain {row['plain_us']:10.1f} us, ratio "
            f"{row['ratio']:.3f} (at most {row['bound']:.3f}; limit {row['limit']})",
            flush=True,
        )
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=1) + "\n")
    if over := [row["case"] for row in record["rows"] if row["bound"] > row["limit"]]:
        sys.exit(f"expected upper bounds within their limits; over them: {'; '.join(over)}")


def windows(requests: int, device: torch.device, cache_bytes: int) -> Case:
    """Decoding with a window over a long context, and without one over a short context; the same bytes."""
    pages = WINDOW // PAGE + 1
    shape = (requests * pages, PAGE, 8, 128)
    layers = layers_of(requests * WINDOW * 8 * 128 * 4, cache_bytes)
    k, v = (torch.randn(layers, *shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    q = torch.randn(requests, 32, 128, dtype=torch.bfloat16, device=device)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    ids = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
    steps: list[Run] = []
    for window_left, length in ((WINDOW - 1, CONTEXT), (-1, WINDOW)):
        spec = AttentionSpec(32, 8, 128, page_size=PAGE, window_left=window_left)
        attention = BatchAttention(
            spec, max_requests=requests, max_tokens=requests, max_kv_len=length, device=device
        )
        table = torch.full((requests, length // PAGE), -1, dtype=torch.int32, device=device)
        last = min(pages, table.shape[1])
        table[:, -last:] = ids[:, -last:]
        lens = torch.full((requests,), length, dtype=torch.int32, device=device)
        attention.plan(starts, PageTable.from_block_table(table, lens, page_size=PAGE))
        out = torch.empty_like(q)
        steps.append(lambda i, attention=attention, out=out: attention.run(q, k[i], v[i], out=out))
    return Case(steps[0], steps[1], layers)


def blocks(rows: int, cols: int, num_heads: int, device: torch.device, cache_bytes: int) -> Case:
    """One block of ten beside all of them, of one sequence."""
    spec = AttentionSpec(8, 2, 128, page_size=BLOCK, causal=False)
    layers = layers_of(cols * 2 * 128 * 4, cache_bytes)
    q = torch.randn(rows, 8, 128, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(layers, cols, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    steps: list[Run] = []
    for density in (0.1, 1.0):
        attention = BlockSparseAttention(
            spec, num_rows=rows, num_cols=cols, block_rows=BLOCK, num_heads=num_heads, device=device
        )
        shape = (num_heads, attention.row_blocks, attention.col_blocks)
        # The same number in every row, since rows of chance would differ.
        order = torch.rand(shape, device=device).argsort(-1)
        attention.plan(order < round(density * shape[2]))
        out = torch.empty_like(q)
        steps.append(lambda i, attention=attention, out=out: attention.run(q, k[i], v[i], out=out))
    return Case(steps[0], steps[1], layers)


def layers_of(kv_bytes: int, cache_bytes: int) -> int:
    """Return one layer on a CPU, where there is no cache to get round, else as many as bench kernels has."""
    return rotated_layers(kv_bytes, cache_bytes) if cache_bytes else 1


def compare(case: Case, clock: Clock | None, runs: int) -> dict[str, Any]:
    """Return medians of one layer in microseconds, the ratio, and its upper 95 % bound.

    clock: of the GPU; None for the processor time of one thread.
    """
    once = timer(case, clock)
    pairs = [once() for _ in range(runs)]
    ours, peer = (list(series) for series in zip(*pairs, strict=True))
    ratio, bound = ratio_with_upper_bound(ours, peer)
    return {
        "sparse_us": statistics.median(ours),
        "plain_us": statistics.median(peer),
        "ratio": ratio,
        "bound": bound,
    }


def timer(case: Case, clock: Clock | None) -> Callable[[], tuple[float, float]]:
    """Return a function that measures one layer of both steps once more."""
    if clock is None:
        cpu = torch.device("cpu")
        sparse, plain = (step_clock(lambda run=run: run(0), cpu) for run in (case.sparse, case.plain))
        return lambda: (sparse(), plain())
    first, second = (clock.capture(run, case.layers) for run in (case.sparse, case.plain))
    spacers = clock.capture_spacers(case.layers)

    def once() -> tuple[float, float]:
        spacer = spacers.time_us()
        both = [(each.time_us() - spacer) / case.layers for each in (first, second)]
        return max(both[0], 0.01), max(both[1], 0.01)

    return once


if __name__ == "__main__":
    main()
