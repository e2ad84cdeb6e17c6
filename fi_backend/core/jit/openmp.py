# SPDX-License-Identifier: Apache-2.0
"""One OpenMP runtime a process.

Our modules leave GOMP_* undefined and take them from the global symbol scope. There must be one
runtime for torch and for us: two pools would each start a thread per core, and an engine that pins
torch's OpenMP threads would not pin ours.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from fi_backend.errors import BuildError


def ensure_runtime() -> None:
    """Put an OpenMP runtime into the global symbol scope unless one is there.

    An imported torch has put its own there (it loads its dependencies with RTLD_GLOBAL); else torch's
    bundled copy is taken, so that a later import of torch finds the same one; else the system's.

    Raises BuildError if there is none.
    """
    if _present():
        return
    for candidate in (*_bundled_with_torch(), "libgomp.so.1"):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        if _present():
            return
    raise BuildError("OpenMP: no libgomp.so.1 found; install libgomp1 (it comes with g++) or torch")


def _present() -> bool:
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")


def _bundled_with_torch() -> list[str]:
    # find_spec locates the package without importing it.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    root = Path(spec.origin).parent
    folders = (root / "lib", root.parent / "torch.libs")
    return [str(path) for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]
