# SPDX-License-Identifier: Apache-2.0
"""What a native module is made of: its sources, its compile-time constants and its target."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_NAME = re.compile(r"[a-z0-9_]+")
_DEFINE = re.compile(r"[A-Za-z_]\w*")
_ARCH = re.compile(r"cpu|sm_[0-9]{2,3}[af]?")


@dataclass(frozen=True)
class ModuleSpec:
    """One shared library to compile and load.

    name       lower-case identifier, unique per (sources, defines); part of the cache folder's name
    sources    files relative to `csrc_root()` (or absolute): `.cc` for g++, `.cu` for nvcc; one object each
    defines    (NAME, value) pairs that become -DNAME=value
    arch       "cpu" (this host's instruction set) or "sm_80", "sm_90a", ... (a CUDA target)
    generated  (file name, text) pairs written where `#include "file name"` of the sources finds them
    recipe     options of `fi-backend build` that make it, for error messages; no part of the identity

    Raises ValueError on a malformed field.
    """

    name: str
    sources: tuple[str, ...]
    defines: tuple[tuple[str, str], ...] = ()
    arch: str = "cpu"
    generated: tuple[tuple[str, str], ...] = ()
    recipe: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: expected [a-z0-9_]+, got {self.name!r}")
        if not self.sources:
            raise ValueError(f"sources: module {self.name} has none; give at least one .cc or .cu file")
        for source in self.sources:
            if Path(source).suffix not in (".cc", ".cu"):
                raise ValueError(f"sources: expected .cc or .cu files, got {source!r}")
            if self.arch == "cpu" and source.endswith(".cu"):
                raise ValueError(f"sources: {source!r} needs a CUDA arch such as sm_90a, got arch='cpu'")
        if not _ARCH.fullmatch(self.arch):
            raise ValueError(f"arch: expected 'cpu' or 'sm_NN[a|f]', got {self.arch!r}")
        for name, _ in self.defines:
            if not _DEFINE.fullmatch(name):
                raise ValueError(f"defines: expected a macro name, got {name!r}")
        for name, _ in self.generated:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"generated: expected a file name below the build folder, got {name!r}")

    @property
    def build_command(self) -> str:
        """The command line that compiles this module ahead of time."""
        target = "" if self.arch == "cpu" else f"--device cuda --arch {self.arch}"
        return " ".join(filter(None, ("fi-backend build", target, self.recipe)))

    def source_paths(self) -> tuple[Path, ...]:
        """Return the absolute paths of the sources."""
        return tuple(csrc_root() / source for source in self.sources)


@cache
def csrc_root() -> Path:
    """Return the folder of the native sources: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for root in (package / "csrc", package.parent / "csrc"):
        if root.is_dir():
            return root
    # A package without native code still lets modules with absolute sources be built.
    return package.parent / "csrc"
