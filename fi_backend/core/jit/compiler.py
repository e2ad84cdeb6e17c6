# SPDX-License-Identifier: Apache-2.0
"""The tools that build a module, their identity for the cache key, and their flags."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fi_backend.core.jit.module import csrc_root
from fi_backend.errors import BuildError

# No -ffast-math: infinities and NaN are values here. No contraction: kernels write fma where they mean
# it, so that the bits do not depend on what the optimiser happened to fuse.
CPU_FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fvisibility=hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra"),
)
# Bindings check arguments and call once; their templates are what a cold build would wait for at -O3
# (8.9 s against 6 s of processor time for the attention binding, g++ 12).
BIND_FLAGS = ("-O1",)
HOST_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
DEFAULT_NVCC = Path("/usr/local/cuda/bin/nvcc")
NVCC_FLAGS = (
    *("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr"),
    "-Xcompiler=-fPIC,-fvisibility=hidden",
)


@dataclass(frozen=True)
class Toolchain:
    """The commands and flags for one target; `compile` and `link` are ready for a build file."""

    cxx: str
    nvcc: str | None
    cxx_flags: tuple[str, ...]
    nvcc_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    def key_flags(self) -> str:
        """Return the flags as one text for the cache key."""
        return "\n".join((*self.cxx_flags, "--", *BIND_FLAGS, "--", *self.nvcc_flags))


def toolchain(arch: str) -> Toolchain:
    """Return the tools for `arch`; raises BuildError that says what to install if one is missing."""
    cxx = _which("g++", "install GCC 12 or newer (Debian and Ubuntu: apt-get install g++)")
    if arch == "cpu":
        return Toolchain(cxx, None, CPU_FLAGS, (), ())
    nvcc = _find_nvcc()
    number = arch.removeprefix("sm_")
    # Always explicit: asking the driver gives sm_90 on Hopper, for which wgmma does not assemble.
    gencode = f"-gencode=arch=compute_{number},code=sm_{number}"
    cuda = Path(nvcc).resolve().parent.parent
    libraries = next((d for d in (cuda / "lib64", cuda / "lib") if d.is_dir()), cuda / "lib64")
    return Toolchain(
        cxx,
        nvcc,
        (*HOST_FLAGS, f"-isystem{cuda / 'include'}"),
        (gencode, *NVCC_FLAGS),
        (f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lcudart"),
    )


def include_dirs() -> list[str]:
    """Return the folders for -I (ours first) that every translation unit gets."""
    from tvm_ffi import libinfo

    return [str(csrc_root()), *libinfo.include_paths()]


def ffi_library() -> Path:
    """Return the path of libtvm_ffi.so."""
    from tvm_ffi import libinfo

    return Path(libinfo.find_libtvm_ffi())


def ninja_binary() -> str:
    """Return the ninja of the Python package, else the one on PATH; raises BuildError if there is none."""
    try:
        import ninja
    except ImportError:
        return _which("ninja", "pip install ninja")
    binary = Path(ninja.BIN_DIR) / "ninja"
    return str(binary) if binary.is_file() else _which("ninja", "pip install ninja")


def host_isa() -> str:
    """Return a text that differs between hosts for which -march=native may differ."""
    fields: dict[str, str] = {}
    wanted = re.compile(r"(vendor_id|cpu family|model|flags|Features|CPU \w+)\s*:\s*(.*)")
    try:
        # One processor's paragraph: the kernel samples frequencies for each, slow on large machines.
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if not line.strip() and fields:
                    break
                if match := wanted.match(line):
                    fields[match[1]] = match[2]
    except OSError:
        fields = {"processor": platform.processor()}
    return platform.machine() + json.dumps(fields, sort_keys=True)


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


def _which(name: str, remedy: str) -> str:
    if path := shutil.which(name):
        return path
    raise BuildError(f"{name}: not found on PATH; {remedy}")


def _find_nvcc() -> str:
    if path := shutil.which("nvcc"):
        # A wrapper script on PATH hides the toolkit's folder, which the linker needs.
        dry = subprocess.run([path, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
        if match := re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE):
            real = Path(match[1]).resolve() / "bin" / "nvcc"
            return str(real) if real.is_file() else path
        return path
    if DEFAULT_NVCC.is_file():
        return str(DEFAULT_NVCC)
    raise BuildError(
        "nvcc: not found on PATH nor in /usr/local/cuda/bin; install the CUDA toolkit 12.4 or newer"
    )
