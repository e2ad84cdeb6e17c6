# SPDX-License-Identifier: Apache-2.0
"""Decoding from a rolling cache: keys rotated inside attention, beside keys rotated into a scratch cache.

    python examples/streaming_llm/measure.py [--device cpu|cuda] [--json FILE]

Both see the same caches and agree before they are measured, turn by turn. The rotation of the unfused version
is one kernel, which torch.compile makes. On CUDA a figure is the time of a replayed graph, on the CPU the
processor time of one thread, in which other programs do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from streaming import FusedStreaming, RollingPages, UnfusedStreaming

from fi_backend import AttentionSpec
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.record import gpu_provenance, provenance
from fi_backend.benchmarks.step_clock import step_clock
from fi_backend.cli.probes.host import cpu_name

PAGE = 16


def main() -> None:
    """Measure every length, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--requests", type=int, help="default: 1 on the CPU, 8 on CUDA")
    parser.add_argument("--heads", type=int, nargs=2, default=[32, 8], help="of queries and of keys")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="the unfused version without torch.compile")
    parser.add_argument("--runs", type=int, default=5, help="pairs of figures for each length")
    parser.add_argument("--json", type=Path, help="file to write the record to")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    torch.set_num_threads(1)
    requests = chosen.requests or (8 if device.type == "cuda" else 1)
    spec = AttentionSpec(*chosen.heads, chosen.head_dim, dtype=chosen.dtype, page_size=PAGE)
    record: dict[str, Any] = gpu_provenance(device) if device.type == "cuda" else provenance(cpu_name())
    record |= {"threads": torch.get_num_threads(), "load": os.getloadavg()[0], "requests": requests}
    record |= {
        "heads": chosen.heads,
        "head_dim": chosen.head_dim,
        "dtype": chosen.dtype,
        "eager": chosen.eager,
        "rows": [],
    }
    for length in chosen.lengths:
        row = measure(spec, requests, length, device, chosen.runs, chosen.eager)
        record["rows"].append(row)
        print(
            f"{requests} x {length:>6} tokens: fused {row['fused_us']:9.1f} us, unfused "
            f"{row['unfused_us']:9.1f} us, fused / unfused {row['ratio']:.2f} (at most {row['bound']:.2f})",
            flush=True,
        )
        if chosen.json:
            chosen.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(
    spec: AttentionSpec, requests: int, length: int, device: torch.device, runs: int, eager: bool
) -> dict[str, Any]:
    """Return the medians of a decoding step over `length` kept tokens, in microseconds, and their ratio."""
    pages = RollingPages(
        requests, page_size=PAGE, sink_pages=1, window_pages=length // PAGE - 1, device=device
    )
    options = {} if eager else {"compile_with": partial(torch.compile, dynamic=False)}
    fused = FusedStreaming(spec, pages, max_tokens=requests)
    unfused = UnfusedStreaming(spec, pages, max_tokens=requests, **options)
    unfused.k_cache, unfused.v_cache = fused.k_cache.normal_(), fused.v_cache.normal_()
    pages.append([length] * requests)
    for _ in range(PAGE):  # a turn of the window
        pages.append([1] * requests)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    q = torch.randn(requests, spec.num_qo_heads, spec.head_dim, device=device).to(fused.k_cache.dtype)
    steps = []
    for layer in (fused, unfused):
        layer.plan(starts)
        steps.append(step_clock(lambda layer=layer: layer.run(q), device, repeats=3))
    expected = unfused.run(q).float()
    error = float((fused.run(q).float() - expected).abs().max() / expected.abs().max())
    if not error < 0.05:
        raise SystemExit(f"{length} tokens: the two differ by {error:.2g} of the largest output")
    figures = [[step() for step in steps] for _ in range(runs)]
    ours, peer = (list(series) for series in zip(*figures, strict=True))
    ratio, bound = ratio_with_upper_bound(ours, peer) if runs > 1 else (ours[0] / peer[0], float("nan"))
    return {
        "length": length,
        "fused_us": statistics.median(ours),
        "unfused_us": statistics.median(peer),
        "ratio": ratio,
        "bound": bound,
        "error": error,
    }


if __name__ == "__main__":
    main()
