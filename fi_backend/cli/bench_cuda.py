# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench kernels --device cuda`: all rows in one process, recorded as they come."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fi_backend.cli.bench_choice import available_peers, chosen_by_name
from fi_backend.cli.shell import InputError, console, error_console, write_json

if TYPE_CHECKING:
    import torch


def torch_device() -> torch.device:
    """Return the device that is measured: torch's current one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def measure_cuda(
    only: str, peers_only: str, runs: int, fa3_library: Path | None, json_file: Path | None
) -> None:
    """Measure, print and record; after every row the file holds all rows so far."""
    import torch

    from fi_backend.benchmarks.cuda import cases as workloads
    from fi_backend.benchmarks.cuda.fa3 import use_library
    from fi_backend.cli.bench_view import cuda_line, print_cuda

    chosen = chosen_by_name(workloads.cases(), only)
    if fa3_library is not None and not fa3_library.is_file():
        raise InputError(f"--fa3-library: expected a file; got {str(fa3_library)!r}")
    if not torch.cuda.is_available():
        raise InputError("--device: expected a device that torch can use; got cuda, and torch sees none")
    if fa3_library is not None:
        use_library(fa3_library)
    from fi_backend.benchmarks.cuda.ceilings import cuda_ceilings
    from fi_backend.benchmarks.cuda.graphs import GraphClock
    from fi_backend.benchmarks.cuda.measure import METHOD, time_case
    from fi_backend.benchmarks.record import gpu_provenance

    device = torch_device()
    peers, absent = available_peers("cuda", peers_only)
    document: dict[str, Any] = {
        **gpu_provenance(device),
        "runs": runs,
        "method": METHOD,
        "peers_absent": absent,
        "ceilings": cuda_ceilings(device),
        "rows": [],
    }

    def record() -> None:
        if json_file is not None:
            # In one step: a run that is killed leaves the rows that it finished.
            partial = json_file.with_name(f".{json_file.name}.part")
            write_json(partial, document)
            partial.replace(json_file)

    record()
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    layers = {case.name: workloads.layers_for(case, l2_bytes) for case in chosen}
    clock = GraphClock(device, max(layers.values()))
    rows = []
    for case in chosen:
        begin = time.perf_counter()
        problem = workloads.make_problem(case, layers=layers[case.name], device=device)
        row = time_case(case, problem, peers, clock, document["ceilings"], runs=runs)
        rows.append(row)
        document["rows"].append(asdict(row))
        record()
        line = f"{cuda_line(row)}  [{time.perf_counter() - begin:.1f} s]"
        error_console().print(line, soft_wrap=True, markup=False)
        # One row's caches take up to 4 GiB, and graphs hold their memory until they are collected.
        del problem
        gc.collect()
        torch.cuda.empty_cache()
    print_cuda(rows, document["gpu"], document["ceilings"])
    for name, reason in absent.items():
        console().print(f"[yellow]{name} was not measured: {reason}[/yellow]", soft_wrap=True)
