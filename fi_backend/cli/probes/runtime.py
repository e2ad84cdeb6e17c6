# SPDX-License-Identifier: Apache-2.0
"""torch, its devices, and which modules of this version are compiled; `inspect` runs in a child process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from fi_backend import env
from fi_backend.cli.probes.child import call_in_child
from fi_backend.core.jit.manifest import Manifest
from fi_backend.errors import BuildError, UnsupportedError


@dataclass(frozen=True)
class Coverage:
    """How much of the shipped list of a CUDA target the cache holds: `ready` modules; `missing` by name."""

    arch: str
    ready: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Runtime:
    """torch: its version, or None with the error. devices: name, capability, target and memory of each GPU.

    ready, missing: CPU modules of this version for the default dtypes that the cache holds, or not.
    coverage: the same for CUDA: for the devices here or, without any, for the targets in the cache.
    torch_cuda, driver_cuda: CUDA versions that torch was built with and that the driver can run.
    """

    torch: str | None
    error: str | None
    threads: int | None
    devices: tuple[dict[str, Any], ...]
    devices_error: str | None
    ready: tuple[str, ...]
    missing: tuple[str, ...]
    coverage: tuple[Coverage, ...] = ()
    torch_cuda: str | None = None
    driver_cuda: str | None = None


def probe_runtime() -> Runtime:
    """Ask a child process."""
    answer, error = call_in_child(f"{__name__}:inspect")
    if answer is None:
        return Runtime(None, error, None, (), None, (), ())
    coverage = tuple(
        Coverage(each["arch"], each["ready"], tuple(each["missing"])) for each in answer["coverage"]
    )
    lists = {name: tuple(answer[name]) for name in ("devices", "ready", "missing")}
    return Runtime(**{**answer, **lists, "coverage": coverage, "error": None})


def inspect() -> dict[str, Any]:
    """Import torch and list what it sees."""
    import torch

    devices, devices_error = [], None
    try:
        devices = [_device(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        devices_error = str(error).splitlines()[0]
    ready, missing = _cpu_modules()
    archs = dict.fromkeys(device["arch"] for device in devices if device["arch"])
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "devices": devices,
        "devices_error": devices_error,
        "ready": ready,
        "missing": missing,
        "coverage": [_coverage(arch) for arch in archs or _archs_in_cache()],
        "torch_cuda": torch.version.cuda,
        "driver_cuda": _driver_cuda(),
    }


def _device(properties: Any) -> dict[str, Any]:
    from fi_backend.core.jit.arch import arch_of_capability

    try:
        arch = arch_of_capability(properties.major, properties.minor)
    except UnsupportedError:
        arch = None
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "arch": arch,
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _cpu_modules() -> tuple[list[str], list[str]]:
    from fi_backend.cli.modules import cpu_specs
    from fi_backend.core.prepare import modules

    return _sorted_out(modules(*cpu_specs([], []), arch="cpu"))


def _coverage(arch: str) -> dict[str, Any]:
    from fi_backend.core.prepare import modules
    from fi_backend.core.shipped import shipped

    ready, missing = _sorted_out([each for each in modules(*shipped(), arch=arch) if each.arch == arch])
    return {"arch": arch, "ready": len(ready), "missing": missing}


def _archs_in_cache() -> list[str]:
    from fi_backend.cli.modules import cached_modules

    try:
        records = [Manifest.read(folder) for folder in cached_modules(env.cache_dir())]
    except ValueError:
        return []
    return sorted({str(each.parts.get("target")) for each in records if each is not None} - {"cpu"})


def _sorted_out(specs: list[Any]) -> tuple[list[str], list[str]]:
    from fi_backend.cli.modules import cached_folder

    ready: list[str] = []
    missing: list[str] = []
    for spec in specs:
        try:
            (missing if cached_folder(spec) is None else ready).append(spec.name)
        except (BuildError, ValueError):  # no sources, or a bad cache folder: other probes say so
            missing.append(spec.name)
    return ready, missing


def _driver_cuda() -> str | None:
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"
