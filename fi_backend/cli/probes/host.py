# SPDX-License-Identifier: Apache-2.0
"""The machine and the package."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import fi_backend

# What the CPU kernels have code paths for (csrc/cpu), by the names of /proc/cpuinfo, best first.
_VECTOR_FLAGS = ("avx512_bf16", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "asimd")


@dataclass(frozen=True)
class Host:
    """Package, Python, system and CPU. vector_units: instruction sets that the kernels can use."""

    package: str
    location: str
    python: str
    system: str
    cpu: str
    cores: int
    vector_units: tuple[str, ...]


def probe_host() -> Host:
    """Describe this machine."""
    model, flags = _cpu(Path("/proc/cpuinfo"))
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(
        package=fi_backend.__version__,
        location=str(Path(fi_backend.__file__).parent),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{_distribution()} (Linux {platform.release()})"
        if platform.system() == "Linux"
        else platform.platform(),
        cpu=model,
        cores=affinity,
        vector_units=tuple(flag for flag in _VECTOR_FLAGS if flag in flags),
    )


def cpu_name() -> str:
    """Return the CPU's model with the number of cores that this process may use."""
    host = probe_host()
    return f"{host.cpu}, {host.cores} cores"


def _cpu(cpuinfo: Path) -> tuple[str, set[str]]:
    try:
        # One processor's paragraph is enough and a large machine has hundreds.
        text = cpuinfo.read_text().split("\n\n")[0]
    except OSError:
        text = ""
    fields = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return fields.get("model name") or platform.processor() or platform.machine(), flags


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return "Linux"
