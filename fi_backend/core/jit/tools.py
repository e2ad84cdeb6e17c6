# SPDX-License-Identifier: Apache-2.0
"""Finding build tools, and their identity for the cache key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from fi_backend.errors import BuildError


class MissingToolError(BuildError):
    """A compiler or ninja is not installed; the text says how to get it."""


def which(name: str, remedy: str) -> str:
    """Return the path of a tool on PATH; raises MissingToolError with `remedy`."""
    if path := shutil.which(name):
        return path
    raise MissingToolError(f"{name}: not found on PATH; {remedy}")


def ninja_binary() -> str:
    """Return the ninja of the Python package, else the one on PATH; raises MissingToolError."""
    try:
        import ninja
    except ImportError:
        return which("ninja", "pip install ninja")
    binary = Path(ninja.BIN_DIR) / "ninja"
    return str(binary) if binary.is_file() else which("ninja", "pip install ninja")


def identity(tool: str, cache_dir: Path) -> str:
    """Return path and version of a compiler; remembered in `cache_dir` by (path, mtime, size)."""
    path = os.path.realpath(tool)
    stat = os.stat(path)
    stamp = f"{path}|{stat.st_mtime_ns}|{stat.st_size}"
    return _identity(tool, stamp, cache_dir / "compilers.json")


@cache
def _identity(tool: str, stamp: str, memo: Path) -> str:
    try:
        known: dict[str, str] = json.loads(memo.read_text())
    except (OSError, ValueError):
        known = {}
    if version := known.get(stamp):
        return f"{tool} {version}"
    run = subprocess.run([tool, "--version"], capture_output=True, text=True)
    if run.returncode != 0:
        raise BuildError(f"compiler: `{tool} --version` failed with {run.returncode}: {run.stderr.strip()}")
    # A wrapper's own file may stay the same while what it starts changes: keep the whole answer.
    version = " ".join(run.stdout.split())
    temporary = memo.with_name(f".{memo.name}.{os.getpid()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**known, stamp: version}, indent=1))
        temporary.replace(memo)
    except OSError:
        pass  # The memo only saves time; a read-only cache is legal.
    return f"{tool} {version}"
