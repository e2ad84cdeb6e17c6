# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench`: measurements with progress, a table, and a JSON file for the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fi_backend.cli.bench_choice import available_peers, chosen_by_name
from fi_backend.cli.bench_serve import report, serve
from fi_backend.cli.shell import BROKEN_ENVIRONMENT, InputError, console, error_console, integers, write_json

if TYPE_CHECKING:
    from rich.progress import Progress

bench = typer.Typer(
    help="Measure planning, kernels and whole engines on this machine.",
    rich_markup_mode=None,
    add_completion=False,
)
for command in (serve, report):
    bench.command()(command)
_Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


@bench.command()
def plan(
    device: Annotated[str, typer.Option(help="Who plans: cpu or cuda.")] = "cpu",
    batch: Annotated[
        str | None, typer.Option(help="cpu: batch sizes, separated by commas (default: 16,64,256,1024).")
    ] = None,
    ctas: Annotated[int, typer.Option(help="CTAs to balance over.")] = 132,
    calls: Annotated[int | None, typer.Option(help="cpu: timed calls of each row (default: 1000).")] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Decode behind shared prompts instead, which are looked for.")
    ] = False,
    json_file: _Json = None,
) -> None:
    """Time planning a step: on the host one of mixed lengths, on a GPU also the search for shared prompts."""
    _expect_device(device, (("--batch", batch, "cpu"), ("--calls", calls, "cpu")))
    batches, calls = integers("--batch", batch or "16,64,256,1024", low=1), 1000 if calls is None else calls
    for option, value in (("--ctas", ctas), ("--calls", calls)):
        if value < 1:
            raise InputError(f"{option}: expected >= 1; got {value}")
    if device == "cuda":
        from fi_backend.cli.bench_plan_cuda import measure_planning

        if not measure_planning(shared=shared, ctas=ctas, json_file=json_file):
            raise typer.Exit(BROKEN_ENVIRONMENT)
        return
    from fi_backend.benchmarks.plan_time import time_planning
    from fi_backend.benchmarks.record import provenance
    from fi_backend.cli.probes.host import cpu_name

    rows = []
    with _progress() as progress:
        task = progress.add_task("planning", total=(3 if shared else 2) * len(batches))
        for size in batches:
            progress.update(task, description=f"batch {size}")
            rows += time_planning(
                size, ctas, shared=shared, calls=calls, progress=lambda: progress.advance(task)
            )

    from rich.table import Table

    console().print(f"µs to plan a step for {ctas} CTAs on {cpu_name()}", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("where", "batch", "median", "p10", "p90", "work items"):
        table.add_column(name, justify="left" if name == "where" else "right")
    for row in rows:
        table.add_row(
            row.where,
            str(row.batch),
            f"{row.median_us:.1f}",
            f"{row.p10_us:.1f}",
            f"{row.p90_us:.1f}",
            str(row.items),
        )
    console().print(table)
    console().print(
        "[dim]host: the whole BatchAttention.plan() with its PageTable; host-native: the planner in it"
        + ("; host-forest: finding what is shared, part of host[/dim]" if shared else "[/dim]")
    )
    if json_file is not None:
        write_json(
            json_file,
            {**provenance(cpu_name()), "ctas": ctas, "shared": shared, "rows": [asdict(row) for row in rows]},
        )


def _expect_device(device: str, options: Sequence[tuple[str, object, str]]) -> None:
    """Check the device, and that options are given on theirs; options: name, value, device."""
    if device not in ("cpu", "cuda"):
        raise InputError(f"--device: expected cpu or cuda; got {device!r}")
    for option, given, where in options:
        if given is not None and device != where:
            raise InputError(f"{option}: expected --device {where}; got {device}")


@contextmanager
def _progress() -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=error_console(), transient=True) as progress:
        yield progress


@bench.command()
def kernels(
    device: Annotated[str, typer.Option(help="Where to run: cpu or cuda.")] = "cpu",
    table: Annotated[
        str | None,
        typer.Option(help="cuda: targets (default), prefill-dims, decode-pages or variants."),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Measure workloads whose name contains one of these, separated by commas.")
    ] = "",
    peers: Annotated[str, typer.Option(help="Measure only these peers, by name, separated by commas.")] = "",
    runs: Annotated[int, typer.Option(help="Interleaved runs, at least 3.")] = 5,
    threads: Annotated[
        int | None, typer.Option(help="cpu: threads of all implementations (default: torch's).")
    ] = None,
    fa3_library: Annotated[
        Path | None, typer.Option(help="cuda: vLLM's FlashAttention 3 file, if vLLM is not installed.")
    ] = None,
    json_file: _Json = None,
) -> None:
    """Time attention of one layer beside other implementations, checked against float64 in the same run."""
    only_cuda = (("--fa3-library", fa3_library, "cuda"), ("--table", table, "cuda"))
    _expect_device(device, (("--threads", threads, "cpu"), *only_cuda))
    for option, value, low in (("--runs", runs, 3), ("--threads", 1 if threads is None else threads, 1)):
        if value < low:
            raise InputError(f"{option}: expected >= {low}; got {value}")
    if device == "cuda":
        from fi_backend.cli.bench_cuda import measure_cuda

        if not measure_cuda(table or "targets", only, peers, runs, fa3_library, json_file):
            raise typer.Exit(BROKEN_ENVIRONMENT)
        return
    import torch

    from fi_backend.benchmarks.ceilings import cpu_ceilings
    from fi_backend.benchmarks.cpu_kernels import time_kernels
    from fi_backend.benchmarks.record import provenance
    from fi_backend.benchmarks.workloads import CPU_SPEC, CPU_WORKLOADS
    from fi_backend.cli.bench_view import print_kernels
    from fi_backend.cli.probes.host import cpu_name

    chosen = chosen_by_name(CPU_WORKLOADS, only)
    if threads is not None:
        torch.set_num_threads(threads)
    found, absent = available_peers(device, peers)
    with _progress() as progress:
        task = progress.add_task("ceilings", total=runs * len(chosen))
        ceilings = cpu_ceilings(CPU_SPEC.dtype)
        rows = []
        for each in chosen:
            progress.update(task, description=each.name)
            rows.append(
                time_kernels(
                    each, CPU_SPEC, found, ceilings, rounds=runs, progress=lambda: progress.advance(task)
                )
            )
    print_kernels(rows, [peer.name for peer in found], ceilings, torch.get_num_threads())
    for name, reason in absent.items():
        console().print(f"[yellow]{name} was not measured: {escape(reason)}[/yellow]", soft_wrap=True)
    if json_file is not None:
        document = {
            **provenance(cpu_name()),
            "threads": torch.get_num_threads(),
            "ceilings": ceilings,
            "rows": [asdict(row) for row in rows],
        }
        write_json(json_file, document)
