# SPDX-License-Identifier: Apache-2.0
"""Where nvcc is: an installed CUDA toolkit, or the compiler packages of PyPI (the extra `cuda-build`)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fi_backend.core.jit.tools import MissingToolError
from fi_backend.env import child_environment

DEFAULT_ROOT = Path("/usr/local/cuda")
ADVICE = "install the CUDA toolkit 12.4 or newer, or pip install 'fi-backend[cuda-build]' for nvcc 13"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its compiler, headers, libraries, major version, and how it was found."""

    nvcc: str
    include: Path
    library: Path
    major: int
    origin: str


def find_toolkit() -> Toolkit:
    """Return the toolkit to compile with.

    Asked in this order: CUDA_HOME, PATH, /usr/local/cuda, Python packages. The first one of torch's own
    major version wins, else the first: a driver that runs torch need not run a newer CUDA.
    Raises MissingToolError that says what to install.
    """
    environment = child_environment()
    found = _toolkits(environment.get("CUDA_HOME", ""), environment.get("PATH", ""), str(DEFAULT_ROOT))
    if not found:
        raise MissingToolError(
            f"nvcc: not found in CUDA_HOME, PATH, {DEFAULT_ROOT} nor in a Python package; {ADVICE}"
        )
    wanted = torch_cuda_major()
    return next((each for each in found if each.major == wanted), found[0])


@cache
def torch_cuda_major() -> int | None:
    """Return the major version of the CUDA that torch was built with, or None; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", text, re.MULTILINE)
    return int(match[1]) if match else None


@cache
def _toolkits(cuda_home: str, search_path: str, default: str) -> tuple[Toolkit, ...]:
    candidates: list[tuple[str, Path]] = []
    if cuda_home:
        candidates.append(("CUDA_HOME", Path(cuda_home) / "bin" / "nvcc"))
    if on_path := shutil.which("nvcc", path=search_path):
        candidates.append(("PATH", Path(on_path)))
    candidates.append((default, Path(default) / "bin" / "nvcc"))
    candidates += [("Python package", nvcc) for nvcc in _packaged()]
    found = (_toolkit(origin, nvcc) for origin, nvcc in candidates if os.access(nvcc, os.X_OK))
    return tuple(each for each in found if each is not None)


def _packaged() -> list[Path]:
    # The packages for CUDA 12 hold ptxas but no nvcc; from 13 on there is one folder for all parts.
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted((nvcc for each in folders or () for nvcc in Path(each).glob("cu*/bin/nvcc")), reverse=True)


def _toolkit(origin: str, nvcc: Path) -> Toolkit | None:
    real = nvcc.resolve()
    root = real.parent.parent
    if not _headers(root) and (top := _ask_for_root(nvcc)):
        root = top
        real = root / "bin" / "nvcc" if (root / "bin" / "nvcc").is_file() else real
    include = _headers(root)
    if include is None:
        return None  # a compiler without headers, as some images keep for ptxas alone
    version = re.search(
        r"define\s+CUDART_VERSION\s+(\d+)", (include / "cuda_runtime_api.h").read_text(errors="replace")
    )
    libraries = (root / "lib64", root / "lib", include.parent / "lib")
    library = next((each for each in libraries if (each / "libcudart_static.a").is_file()), libraries[0])
    return Toolkit(str(real), include, library, int(version[1]) // 1000 if version else 0, origin)


def _headers(root: Path) -> Path | None:
    for include in (root / "include", *sorted(root.glob("targets/*/include"))):
        if (include / "cuda_runtime_api.h").is_file():
            return include
    return None


def _ask_for_root(nvcc: Path) -> Path | None:
    # A wrapper script hides the toolkit's folder; the compiler that it starts knows it.
    command = [str(nvcc), "--dryrun", "-x", "cu", os.devnull]
    dry = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    return Path(match[1]).resolve() if match else None
