# SPDX-License-Identifier: Apache-2.0
"""torch, its devices, and which modules of this version are compiled; `inspect` runs in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fi_backend.cli.probes.child import call_in_child
from fi_backend.errors import BuildError


@dataclass(frozen=True)
class Runtime:
    """torch: its version, or None with the error. devices: name, capability and memory of each CUDA device.

    ready, missing: modules of this version for the default dtypes that the cache holds, or not.
    """

    torch: str | None
    error: str | None
    threads: int | None
    devices: tuple[dict[str, Any], ...]
    devices_error: str | None
    ready: tuple[str, ...]
    missing: tuple[str, ...]


def probe_runtime() -> Runtime:
    """Ask a child process."""
    answer, error = call_in_child(f"{__name__}:inspect")
    if answer is None:
        return Runtime(None, error, None, (), None, (), ())
    return Runtime(
        torch=answer["torch"],
        error=None,
        threads=answer["threads"],
        devices=tuple(answer["devices"]),
        devices_error=answer["devices_error"],
        ready=tuple(answer["ready"]),
        missing=tuple(answer["missing"]),
    )


def inspect() -> dict[str, Any]:
    """Import torch and list what it sees."""
    import torch

    devices, devices_error = [], None
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "name": properties.name,
                    "capability": f"{properties.major}.{properties.minor}",
                    "memory_gib": round(properties.total_memory / 2**30, 1),
                }
            )
    except (RuntimeError, AssertionError) as error:
        devices_error = str(error).splitlines()[0]
    ready, missing = _modules()
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": devices,
        "devices_error": devices_error,
        "ready": ready,
        "missing": missing,
    }


def _modules() -> tuple[list[str], list[str]]:
    from fi_backend.cli.modules import DEFAULT_DTYPES, SAME, cached_folder, cpu_modules

    ready: list[str] = []
    missing: list[str] = []
    for spec in cpu_modules(DEFAULT_DTYPES, [SAME]):
        try:
            (missing if cached_folder(spec) is None else ready).append(spec.name)
        except (BuildError, ValueError):  # no compiler, or a bad cache folder: other probes say so
            missing.append(spec.name)
    return ready, missing
