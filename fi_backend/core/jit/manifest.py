# SPDX-License-Identifier: Apache-2.0
"""What a compiled module says about itself, so that a machine without compilers can use it."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import fi_backend
from fi_backend.core.jit.compiler import toolchain
from fi_backend.core.jit.isa import host_features, portable_features
from fi_backend.core.jit.key import ffi_version, source_parts
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.ninja_file import LIBRARY
from fi_backend.core.jit.tools import identity

MANIFEST = "module.json"


@dataclass(frozen=True)
class Manifest:
    """The record beside a library.

    package, tvm_ffi, compilers: versions that it was made from and with; parts: see key.source_parts;
    machine, features: the processor that it needs (no features for a CUDA module's host code).
    """

    package: str
    tvm_ffi: str
    compilers: tuple[str, ...]
    parts: dict[str, str]
    machine: str
    features: tuple[str, ...]

    @classmethod
    def of_build(cls, spec: ModuleSpec, cache_dir: Path, *, portable: bool) -> Manifest:
        """Describe the module that this machine makes of `spec`."""
        tools = toolchain(spec.arch, portable=portable)
        features = portable_features() if portable else host_features()
        return cls(
            package=fi_backend.__version__,
            tvm_ffi=ffi_version(),
            compilers=tuple(identity(tool, cache_dir) for tool in (tools.cxx, tools.nvcc) if tool),
            parts=source_parts(spec),
            machine=platform.machine(),
            features=tuple(sorted(features)) if spec.arch == "cpu" else (),
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Read the record of the module in `folder`, or return None if it has none that is readable."""
        try:
            fields = json.loads((folder / MANIFEST).read_text())
            lists = {name: tuple(fields[name]) for name in ("compilers", "features")}
            return cls(**{**fields, **lists})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, folder: Path) -> None:
        """Write the record into the module's folder."""
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def obstacles(self, parts: dict[str, str]) -> list[str]:
        """Return what keeps this module from serving here a spec with `parts`; nothing if it fits."""
        found = []
        if self.parts.get("target") != parts["target"]:
            return [f"it is for {self.parts.get('target')}"]
        if differing := [name for name in parts if self.parts.get(name) != parts[name]]:
            found.append(f"{' and '.join(differing)} differ (fi_backend {self.package})")
        if not _ffi_serves(self.tvm_ffi, ffi_version()):
            found.append(f"it needs tvm-ffi {self.tvm_ffi}, here is {ffi_version()}")
        if self.machine != platform.machine():
            found.append(f"it is for {self.machine}, here is {platform.machine()}")
        elif lacking := set(self.features) - host_features():
            found.append(f"this processor lacks {', '.join(sorted(lacking))}")
        return found


@dataclass(frozen=True)
class Search:
    """Modules that other machines made of a spec: those that fit, best first, and why others do not."""

    fitting: tuple[Path, ...]
    native: tuple[Path, ...]
    refused: tuple[str, ...]


def search(spec: ModuleSpec, cache_dir: Path) -> Search:
    """Look through the cache for modules of `spec`, whoever compiled them.

    fitting: what this host can load, most of its instruction sets first, then the newest tvm-ffi, then
    the folder's name; native: those of them that use this host's instruction sets fully.
    """
    parts = source_parts(spec)
    fitting: list[tuple[int, tuple[int, ...], str, Path]] = []
    native, refused = [], []
    for folder in sorted(cache_dir.glob(f"{spec.name}-*")):
        if not (folder / LIBRARY).is_file() or (manifest := Manifest.read(folder)) is None:
            continue
        if obstacles := manifest.obstacles(parts):
            refused.append(f"{folder.name}: {'; '.join(obstacles)}")
            continue
        fitting.append((len(manifest.features), _release(manifest.tvm_ffi), folder.name, folder))
        if spec.arch != "cpu" or set(manifest.features) == host_features():
            native.append(folder)
    ordered = tuple(each[-1] for each in sorted(fitting, reverse=True))
    return Search(ordered, tuple(each for each in ordered if each in native), tuple(refused))


def _ffi_serves(built: str, here: str) -> bool:
    # Below 1.0 the second number is the ABI's; a module may use what its own version added.
    built_release, here_release = _release(built), _release(here)
    return built_release[:2] == here_release[:2] and built_release <= here_release


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition(".post")[0])[:3])
