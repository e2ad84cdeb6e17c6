# SPDX-License-Identifier: Apache-2.0
"""The compilers of a module and their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fi_backend.core.jit.ffi import tvm_ffi
from fi_backend.core.jit.isa import portable_flags
from fi_backend.core.jit.module import csrc_root
from fi_backend.core.jit.toolkit import find_toolkit
from fi_backend.core.jit.tools import which

NATIVE = "-march=native"
# No -ffast-math: infinities and NaN are values here. No contraction: kernels write fma where they mean
# it, so that the bits do not depend on what the optimiser happened to fuse.
CPU_FLAGS = (
    *("-std=c++20", "-O3", NATIVE, "-fopenmp", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra"),
)
# Bindings check arguments and call once; their templates are what a cold build would wait for at -O3
# (8.9 s against 6 s of processor time for the attention binding, g++ 12).
BIND_FLAGS = ("-O1",)
HOST_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# -Xptxas=-v: registers and spills of every kernel go into the module's build.log.
NVCC_FLAGS = (
    *("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xptxas=-v"),
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)
# A runtime of its own in every module: it runs where no libcudart is found and beside any torch, with
# which it shares the device's primary context. Hidden, or the loader would bind to torch's symbols.
CUDART_FLAGS = ("-lcudart_static", "-lrt", "-ldl", "-lpthread", "-Wl,--exclude-libs,libcudart_static.a")


@dataclass(frozen=True)
class Flags:
    """Compiler flags of one target, without any path of this machine."""

    cxx: tuple[str, ...]
    nvcc: tuple[str, ...]

    def text(self) -> str:
        """Return all of them as one text for keys."""
        return "\n".join((*self.cxx, "--", *BIND_FLAGS, "--", *self.nvcc))


@dataclass(frozen=True)
class Toolchain:
    """The commands and flags for one target, ready for a build file."""

    cxx: str
    nvcc: str | None
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]


def flags(arch: str, *, portable: bool = False) -> Flags:
    """Return the flags for `arch`; portable: for the instructions that all hosts have, not this one's."""
    if arch == "cpu":
        if not portable:
            return Flags(CPU_FLAGS, ())
        return Flags((*(flag for flag in CPU_FLAGS if flag != NATIVE), *portable_flags()), ())
    number = arch.removeprefix("sm_")
    # Always explicit: asking the driver gives sm_90 on Hopper, for which wgmma does not assemble.
    gencode = f"-gencode=arch=compute_{number},code=sm_{number}"
    return Flags(HOST_FLAGS, (gencode, *NVCC_FLAGS))


def toolchain(arch: str, *, portable: bool = False) -> Toolchain:
    """Return the tools for `arch`; raises MissingToolError that says what to install."""
    cxx = which("g++", "install GCC 12 or newer (Debian and Ubuntu: apt-get install g++)")
    chosen = flags(arch, portable=portable)
    if arch == "cpu":
        return Toolchain(cxx, None, chosen.cxx, (), ())
    toolkit = find_toolkit()
    return Toolchain(
        cxx,
        toolkit.nvcc,
        (*chosen.cxx, f"-isystem{toolkit.include}"),
        chosen.nvcc,
        (f"-L{toolkit.library}", *CUDART_FLAGS),
    )


def include_dirs() -> list[str]:
    """Return the folders for -I (ours first) that every translation unit gets."""
    return [str(csrc_root()), *tvm_ffi().libinfo.include_paths()]


def ffi_library() -> Path:
    """Return the path of libtvm_ffi.so."""
    return Path(tvm_ffi().libinfo.find_libtvm_ffi())
