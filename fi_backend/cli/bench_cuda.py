# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench kernels --device cuda`: all rows in one process, recorded as they come."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from fi_backend.cli.bench_choice import available_peers, chosen_by_name
from fi_backend.cli.shell import InputError, console, error_console, write_json
from fi_backend.errors import BuildError

if TYPE_CHECKING:
    import torch

    from fi_backend.benchmarks.cuda.cases import Case


def torch_device() -> torch.device:
    """Return the device that is measured: torch's current one."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def measure_cuda(
    table: str, only: str, peers_only: str, runs: int, fa3_library: Path | None, json_file: Path | None
) -> bool:
    """Measure, print and record; after every row the file holds all rows so far.

    Returns whether every row stands: see CudaTiming.failed.
    """
    import torch

    from fi_backend.benchmarks.cuda import cases as workloads
    from fi_backend.benchmarks.cuda.fa3 import use_library
    from fi_backend.benchmarks.cuda.tables import TABLES
    from fi_backend.cli.bench_view import cuda_line, print_cuda

    if table not in TABLES:
        raise InputError(f"--table: expected one of {', '.join(TABLES)}; got {table!r}")
    chosen = chosen_by_name(TABLES[table](), only)
    if fa3_library is not None and not fa3_library.is_file():
        raise InputError(f"--fa3-library: expected a file; got {str(fa3_library)!r}")
    if not torch.cuda.is_available():
        raise InputError("--device: expected a device that torch can use; got cuda, and torch sees none")
    if fa3_library is not None:
        use_library(fa3_library)
    from fi_backend.benchmarks.cuda.ceilings import cuda_ceilings
    from fi_backend.benchmarks.cuda.graphs import GraphClock
    from fi_backend.benchmarks.cuda.measure import METHOD, time_case
    from fi_backend.benchmarks.cuda.row import summary
    from fi_backend.benchmarks.record import gpu_provenance

    device = torch_device()
    peers, absent = available_peers("cuda", peers_only)
    document: dict[str, Any] = {
        **gpu_provenance(device),
        "table": table,
        "runs": runs,
        "method": METHOD,
        "peers_absent": absent,
        "ceilings": cuda_ceilings(device),
        "summary": summary([]),
        "rows": [],
    }

    def record() -> None:
        if json_file is not None:
            # In one step: a run that is killed leaves the rows that it finished.
            partial = json_file.with_name(f".{json_file.name}.part")
            write_json(partial, document)
            partial.replace(json_file)

    record()
    _compile(chosen, device)
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
        document["summary"] = summary(rows)
        record()
        line = f"{cuda_line(row)}  [{time.perf_counter() - begin:.1f} s]"
        error_console().print(line, soft_wrap=True, markup=False)
        # One row's caches take up to 4 GiB, and graphs hold their memory until they are collected.
        del problem
        gc.collect()
        torch.cuda.empty_cache()
    print_cuda(rows, document["gpu"], document["ceilings"])
    for name, reason in absent.items():
        console().print(f"[yellow]{name} was not measured: {escape(reason)}[/yellow]", soft_wrap=True)
    return not document["summary"]["failed"]


def _compile(chosen: Sequence[Case], device: torch.device) -> None:
    """Build what the rows run, all of it at once; a module that fails is named in its rows."""
    from fi_backend.benchmarks.variant_oracles import ORACLES
    from fi_backend.core import jit
    from fi_backend.core.jit.arch import cuda_arch
    from fi_backend.core.kernels import attention_module, with_variant
    from fi_backend.core.prepare import modules as common
    from fi_backend.core.variant_names import find_variant

    modules = common(arch="cpu" if device.type == "cpu" else cuda_arch(device))
    for case in chosen:
        for variant in (None, *(find_variant(name) for name in case.variants if name in ORACLES)):
            modules.append(with_variant(attention_module(case.spec, device, variant), variant))
    with suppress(BuildError):
        jit.build_all(list(dict.fromkeys(modules)))
