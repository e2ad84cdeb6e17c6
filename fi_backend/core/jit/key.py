# SPDX-License-Identifier: Apache-2.0
"""What a binary depends on, as digests: once with, once without the machine that compiles it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

from fi_backend.core.jit.compiler import flags, toolchain
from fi_backend.core.jit.isa import host_isa
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.sources import dependency_texts
from fi_backend.core.jit.tools import identity

_LAYOUT = "2"  # Raised when the way a module is built changes without a change of flags.


def source_parts(spec: ModuleSpec) -> dict[str, str]:
    """Return a digest of each part of `spec` that is the same on every machine, by name of the part.

    Neither compilers nor the host count: two machines with equal parts make modules that can replace
    each other where the processor and tvm-ffi allow it. Raises BuildError if a source is missing.
    """
    return {
        "layout": _LAYOUT,
        "target": spec.arch,
        "flags": _digest([("flags", flags(spec.arch).text().encode())]),
        "defines": _digest((name, value.encode()) for name, value in spec.defines),
        "sources": _digest(dependency_texts(spec)),
    }


def module_key(spec: ModuleSpec, cache_dir: Path, *, portable: bool = False) -> str:
    """Return the hex sha256 of everything that the binary made here depends on.

    That is: name and `source_parts` of `spec`, path and version of the compilers, the version of tvm-ffi
    and, for the CPU, the host's instruction set or, if portable, the flags that stand for it.
    `cache_dir` remembers the compilers' versions. Raises MissingToolError where there is no compiler.
    """
    tools = toolchain(spec.arch, portable=portable)
    fields = [("name", spec.name), *source_parts(spec).items(), ("cxx", identity(tools.cxx, cache_dir))]
    if tools.nvcc is not None:
        fields.append(("nvcc", identity(tools.nvcc, cache_dir)))
    fields.append(("tvm-ffi", ffi_version()))
    if spec.arch == "cpu":
        fields.append(("isa", " ".join(tools.cxx_flags) if portable else host_isa()))
    return _digest((label, value.encode()) for label, value in fields)


def ffi_version() -> str:
    """Return the version of the installed tvm-ffi."""
    return importlib.metadata.version("apache-tvm-ffi")


def _digest(fields: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for label, data in fields:
        # Lengths keep neighbouring fields apart.
        digest.update(f"{label}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()
