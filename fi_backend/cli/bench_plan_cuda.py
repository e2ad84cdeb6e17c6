# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench plan --device cuda`: plans that a GPU makes, and prefixes that it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fi_backend.cli.shell import InputError, console, error_console, write_json

if TYPE_CHECKING:
    from fi_backend.benchmarks.cuda.plan_time import DevicePlanTiming


def measure_planning(*, shared: bool, ctas: int, json_file: Path | None) -> bool:
    """Measure, print and record; return whether every plan is the host's and within its limit."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("--device: expected a device that torch can use; got cuda, and torch sees none")
    from fi_backend.benchmarks.cuda.plan_time import PLANS, graph_timer, time_device_planning
    from fi_backend.benchmarks.record import gpu_provenance
    from fi_backend.cli.bench_cuda import torch_device

    device = torch_device()
    known = gpu_provenance(device)
    timer = graph_timer(device)
    rows = []
    for row in time_device_planning(device, known["gpu"], timer, shared=shared, num_ctas=ctas):
        error_console().print(f"{row.step}, batch {row.batch}: {row.median_us:.2f} µs", markup=False)
        rows.append(row)
    if json_file is not None:
        document = {**known, "ctas": ctas, "shared": shared, "plans_in_a_graph": PLANS}
        write_json(json_file, {**document, "rows": [asdict(row) for row in rows]})
    _print(rows, known["gpu"], ctas)
    return not any(row.failed for row in rows)


def _print(rows: Sequence[DevicePlanTiming], gpu: str, ctas: int) -> None:
    from rich.table import Table

    console().print(f"µs of a plan for {ctas} CTAs on {gpu}, launch included", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("step", no_wrap=True)
    for name in ("batch", "longest", "median", "p10", "p90", "limit", "work items", "nodes"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(row.step, str(row.batch), str(row.context)),
            *(f"{us:.2f}" for us in (row.median_us, row.p10_us, row.p90_us)),
            "-" if row.limit_us is None else f"{row.limit_us:g}",
            *(str(row.items), str(row.prefix_nodes)),
        )
    console().print(table)
    for row in rows:
        if row.failed:
            text = f"[red]{row.step}, batch {row.batch}, failed: {row.failed}[/red]"
            console().print(text, soft_wrap=True)
