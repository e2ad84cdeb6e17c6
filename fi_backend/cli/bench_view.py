# SPDX-License-Identifier: Apache-2.0
"""The tables of `bench kernels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from fi_backend.cli.probes.host import cpu_name
from fi_backend.cli.shell import console

if TYPE_CHECKING:
    from fi_backend.benchmarks.cpu_kernels import KernelTiming
    from fi_backend.benchmarks.cuda.row import CudaTiming


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


def cuda_line(row: CudaTiming) -> str:
    """Return a row in one line, for watching a run; failures of ours and of peers at its end."""
    ours = "failed" if row.ours_us is None else f"{row.ours_us:.1f} µs"
    peers = ", ".join(f"{name} {us:.1f}" for name, us in sorted(row.peers.items(), key=lambda item: item[1]))
    failed = "; ".join(
        f"{name}: {reason[:160]}" for name, reason in row.not_measured.items() if ": " in reason
    )
    return f"{row.workload}: fi {ours} | {peers or 'no peer'}" + (f" | {failed}" if failed else "")


def _other_ways(row: CudaTiming) -> str:
    """Return times of other ways of ours, and of peers with a mark; in brackets, what they are to ours."""
    ways = [
        f"{name} {_number(each['us'], '.1f')} ({_number(each['ratio'], '.3f')})"
        for name, each in row.variants.items()
    ]
    marked = [f"{name} {row.peers[name]:.1f}" for name in row.marked]
    return ", ".join((*ways, *marked))


def print_cuda(rows: Sequence[CudaTiming], gpu: str, ceilings: Mapping[str, float]) -> None:
    """Print the timings: ours, the best peer, what the GPU allows, errors, and other ways of ours."""
    console().print(
        f"µs a layer on {gpu}, which reads {ceilings['read_gbs']:.0f} GB/s, copies "
        f"{ceilings['copy_gbs']:.0f} GB/s and multiplies at {ceilings['matmul_tflops']:.0f} TFLOP/s",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for name in ("fi", "±", "best", "ratio", "≤ 95 %", "floor", "read", "flop", "err / best", "nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("best peer", no_wrap=True)
    table.add_column("other ways", overflow="fold")
    for row in rows:
        best = None if row.best_peer is None else row.peers[row.best_peer]
        errors = (error for name, error in row.peers_rms_err.items() if name not in row.marked)
        known = [error for error in errors if error is not None]
        table.add_row(
            row.workload,
            _number(row.ours_us, ".1f"),
            "-" if row.ours_us is None else f"{_spread(row):.1%}",
            _number(best, ".1f"),
            _number(row.ratio, ".3f"),
            _number(row.ratio_upper95, ".3f"),
            f"{row.floor_us:.1f}",
            _number(row.bandwidth_share, ".0%"),
            _number(row.flops_share, ".0%"),
            _number(row.rms_err / min(known) if row.rms_err is not None and known else None, ".2f"),
            str(row.prefix_nodes or "-"),
            row.best_peer or "-",
            _other_ways(row),
        )
    console().print(table)
    for row in rows:
        for name in row.wrong:
            console().print(f"[yellow]{row.workload}: {name} is wrong and does not count[/yellow]")
        for reason in row.failed:
            console().print(f"[red]{row.workload} failed: {escape(reason)}[/red]", soft_wrap=True)


def _spread(row: CudaTiming) -> float:
    low, high = row.ours_spread or (0.0, 0.0)
    return (high - low) / 2 / (row.ours_us or 1.0)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
