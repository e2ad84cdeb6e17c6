# SPDX-License-Identifier: Apache-2.0
"""Writes the build file of some modules and runs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fi_backend.core.jit.compiler import BIND_FLAGS, ffi_library, include_dirs, toolchain
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.tools import ninja_binary
from fi_backend.env import child_environment

LIBRARY = "module.so"
_STATUS = re.compile(r"\[(\d+)/(\d+)\] ")


@dataclass(frozen=True)
class Target:
    """A module to build in `folder`, where its library appears as `module.so`."""

    spec: ModuleSpec
    folder: Path
    portable: bool = False

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY


def write_build_file(path: Path, targets: list[Target]) -> int:
    """Write the generated headers and the build file of `targets`; return the number of objects.

    Modules that compile a source in the same way share its object: a binding may be the same for many
    CUDA targets, and takes as long as a kernel.
    """
    lines = ["ninja_required_version = 1.3"]
    ffi = ffi_library()
    includes = [f"-I{folder}" for folder in include_dirs()]
    objects: dict[tuple[str, ...], Path] = {}
    for target in targets:
        spec = target.spec
        tools = toolchain(spec.arch, portable=target.portable)
        generated = target.folder / "include"
        for name, text in spec.generated:
            file = generated / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        common = [*includes, *(f"-D{name}={value}" for name, value in spec.defines)]
        if spec.generated:
            common.insert(0, f"-I{generated}")
        outputs = []
        for number, source in enumerate(spec.source_paths()):
            if source.suffix == ".cu":
                assert tools.nvcc is not None, "ModuleSpec admits .cu only with a CUDA arch"
                command = [tools.nvcc, *tools.nvcc_flags, *common]
            else:
                binding = BIND_FLAGS if source.parent.name == "bind" else ()
                command = [tools.cxx, *tools.cxx_flags, *binding, *common]
            command += ["-c", str(source)]
            if (output := objects.get(tuple(command))) is None:
                output = objects[tuple(command)] = target.folder / f"{number}_{source.stem}.o"
                lines += _edge(f"r{len(lines)}", [*command, "-o", str(output)], [source], output)
            outputs.append(output)
        # -fopenmp is absent on purpose: it would link a second OpenMP runtime (openmp.py).
        command = [tools.cxx, "-shared", *map(str, outputs), "-o", str(target.library)]
        command += [*tools.link_flags, f"-L{ffi.parent}", "-ltvm_ffi", f"-Wl,-rpath,{ffi.parent}"]
        lines += _edge(f"r{len(lines)}", command, outputs, target.library)
    path.write_text("\n".join(lines) + "\n")
    return len(objects)


def run_build_file(path: Path, on_step: Callable[[int, int], None], log: Path) -> int:
    """Run the build file at `path`, write what it prints to `log`, return ninja's exit status.

    on_step is called with (steps done, steps in all) at each finished step. Other modules of the same
    run are finished even if one fails.
    """
    # Affinity, not the machine's count: a container or an engine may own a few cores only.
    jobs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = [ninja_binary(), "-f", path.name, "-k", "0", "-j", str(max(1, jobs)), "-v"]
    environment = child_environment(NINJA_STATUS="[%f/%t] ", LC_ALL="C")
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=path.parent,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(line)
                if match := _STATUS.match(line):
                    on_step(int(match[1]), int(match[2]))
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _edge(rule: str, command: list[str], inputs: list[Path], output: Path) -> list[str]:
    return [
        f"rule {rule}",
        f"  command = {_value(shlex.join(command))}",
        f"build {_path(output)}: {rule} {' '.join(map(_path, inputs))}",
    ]


def _value(text: str) -> str:
    return text.replace("$", "$$").replace("\n", " ")


def _path(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
