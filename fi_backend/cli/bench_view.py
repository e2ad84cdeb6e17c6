# SPDX-License-Identifier: Apache-2.0
"""The table of `bench kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from fi_backend.benchmarks.cpu_kernels import KernelTiming
from fi_backend.cli.probes.host import cpu_name
from fi_backend.cli.shell import console


def print_kernels(
    rows: Sequence[KernelTiming], peers: Sequence[str], ceilings: Mapping[str, float], threads: int
) -> None:
    """Print the timings with the peers beside ours."""
    console().print(
        f"µs a layer on {cpu_name()}, {threads} threads, which read {ceilings['read_gbs']:.1f} GB/s "
        f"and multiply at {ceilings['matmul_tflops']:.2f} TFLOP/s",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for name in ("fi", "±", *peers, "fi / best", "floor", "tokens/s", "GB/s", "max err"):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        low, high = row.ours_spread
        best = min(row.peers.values(), default=None)
        table.add_row(
            row.workload,
            f"{row.ours_us:.0f}",
            f"{(high - low) / 2 / row.ours_us:.0%}",
            *(f"{row.peers[name]:.0f}" if name in row.peers else "-" for name in peers),
            "-" if best is None else f"{row.ours_us / best:.2f}",
            f"{row.floor_us:.0f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.gbs:.1f}",
            f"{row.max_err:.1e}",
        )
    console().print(table)
