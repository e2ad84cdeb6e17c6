# SPDX-License-Identifier: Apache-2.0
"""Environment variables: the only module that reads the process environment.

Every function reads its variable anew, so a test or a launcher may change it at any time, and raises
ValueError on a value that it does not understand: a mistyped setting must not pass for the default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class Variable:
    """One documented variable: its name, the text of its default, and what it does."""

    name: str
    default: str
    meaning: str


CACHE_DIR: Final = Variable(
    "FI_BACKEND_CACHE_DIR",
    "`$XDG_CACHE_HOME/fi_backend`, else `~/.cache/fi_backend`",
    "Folder of the compiled modules and of the build logs.",
)
DISABLE_JIT: Final = Variable(
    "FI_BACKEND_DISABLE_JIT",
    "`0`",
    "`1`: never compile; a module that is not in the cache is an error that names it.",
)
DEBUG: Final = Variable(
    "FI_BACKEND_DEBUG",
    "`0`",
    "`1`: check the contents of index tensors (page ids, lengths) in every run; on a GPU it then waits for "
    "the run.",
)
STATS_DIR: Final = Variable(
    "FI_BACKEND_STATS_DIR",
    "unset",
    "Folder of the files in which every serving process counts its attention calls, and of the steps that "
    "`fi-backend stats --capture` asks for.",
)
WITHOUT: Final = Variable(
    "FI_BACKEND_WITHOUT",
    "unset",
    "What an engine's steps do without, to measure what it brings, separated by commas: `sharing` (every "
    "request reads its whole KV cache itself), `lpt` (work items stand in the order of the requests), "
    "`device_plan` (the host plans, and waits for what only the GPU knows).",
)
VARIABLES: Final = (CACHE_DIR, DISABLE_JIT, DEBUG, STATS_DIR, WITHOUT)

SHARING: Final = "sharing"
LPT: Final = "lpt"
DEVICE_PLAN: Final = "device_plan"
MECHANISMS: Final = (SHARING, LPT, DEVICE_PLAN)


def cache_dir() -> Path:
    """Return the absolute folder of the compiled modules; it need not exist yet."""
    if value := os.environ.get(CACHE_DIR.name):
        return _absolute(CACHE_DIR.name, value)
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative value is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "fi_backend"


def jit_disabled() -> bool:
    """Return whether compiling at run time is forbidden."""
    return _flag(DISABLE_JIT.name)


def debug() -> bool:
    """Return whether every run checks the contents of index tensors."""
    return _flag(DEBUG.name)


def without() -> frozenset[str]:
    """Return what engines' steps do without, of MECHANISMS."""
    value = os.environ.get(WITHOUT.name, "")
    # Blanks separate too: `bench serve` takes commas for the ends of its back ends.
    names = frozenset(value.replace(",", " ").split())
    if unknown := sorted(names.difference(MECHANISMS)):
        raise ValueError(
            f"{WITHOUT.name}: expected any of {', '.join(MECHANISMS)}, separated by commas; got "
            f"{unknown[0]!r} in {value!r}"
        )
    return names


def stats_dir() -> Path | None:
    """Return the absolute folder for statistics files, or None if none are wanted."""
    value = os.environ.get(STATS_DIR.name)
    return _absolute(STATS_DIR.name, value) if value else None


def child_environment(**overrides: str) -> dict[str, str]:
    """Return a copy of this process's environment with `overrides` set, for a child process."""
    return {**os.environ, **overrides}


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ValueError(f"{name}: expected 0 or 1, got {value!r}; set it to 1 or unset it")


def _absolute(name: str, value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError(
            f"{name}: expected an absolute path, got {value!r}; processes differ in their working folder"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name}: expected a folder, got the file {value!r}")
    return path
