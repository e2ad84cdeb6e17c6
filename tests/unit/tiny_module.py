# SPDX-License-Identifier: Apache-2.0
"""A native module of a few lines, made in a temporary folder, for the tests of the build layer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fi_backend.core.jit import ModuleSpec

KERNEL = """
#include "factor.h"
#include "offset.h"
double scaled(double x) { return x * FACTOR + OFFSET; }
int threads() {
  int n = 0;
#pragma omp parallel reduction(+ : n)
  n += 1;
  return n;
}
"""

BINDING = """
#include <tvm/ffi/function.h>
double scaled(double x);
int threads();
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scaled, scaled);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(threads, threads);
"""

PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from tiny_module import TinyModule
from fi_backend.core.jit import load
print(load(TinyModule(Path({folder!r})).spec()).scaled(2.0))
"""


@dataclass(frozen=True)
class TinyModule:
    """Two sources and a chain of two headers in `folder`; scaled(x) = x * FACTOR + OFFSET."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> TinyModule:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cc").write_text(KERNEL)
        (folder / "binding.cc").write_text(BINDING)
        (folder / "factor.h").write_text('#pragma once\n#include "deeper.h"\n')
        (folder / "deeper.h").write_text("#pragma once\n#ifndef FACTOR\n#define FACTOR 10.0\n#endif\n")
        return cls(folder)

    def spec(
        self,
        *,
        name: str = "tiny",
        defines: tuple[tuple[str, str], ...] = (),
        offset: str = "0.5",
    ) -> ModuleSpec:
        """Return the spec; `offset` goes into a generated header."""
        sources = tuple(str(self.folder / file) for file in ("kernel.cc", "binding.cc"))
        return ModuleSpec(name, sources, defines, generated=(("offset.h", f"#define OFFSET {offset}\n"),))

    def start(
        self, cache: Path, *, prefix: tuple[str, ...] = (), search_path: Path | None = None, **variables: str
    ) -> subprocess.Popen[str]:
        """Start a fresh interpreter that loads the module with `cache` and prints scaled(2)."""
        here = Path(__file__).resolve().parent
        program = PROGRAM.format(path=[str(here), str(here.parents[1])], folder=str(self.folder))
        environment = {**os.environ, "FI_BACKEND_CACHE_DIR": str(cache), **variables}
        if search_path is not None:
            environment["PATH"] = f"{search_path}{os.pathsep}{environment['PATH']}"
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@dataclass(frozen=True)
class RecordingCompiler:
    """A g++ in `folder` that notes every call, and stands still at each compilation while `stall` exists."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> RecordingCompiler:
        folder.mkdir()
        made = cls(folder)
        script = folder / "g++"
        script.write_text(
            "#!/bin/sh\n"
            f'case " $* " in *" -c "*) echo compile >> {made.log}\n'
            f"while [ -e {made.stall} ]; do sleep 0.05; done;; esac\n"
            f'exec {shutil.which("g++")} "$@"\n'
        )
        script.chmod(0o755)
        return made

    @property
    def log(self) -> Path:
        return self.folder / "calls.log"

    @property
    def stall(self) -> Path:
        return self.folder / "stall"

    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def kill_session(leader: subprocess.Popen[str]) -> None:
    """Kill everything that `leader`, the first process of a session of its own, started, and reap it.

    ninja gives each compiler a process group of its own: killing the leader's group would leave compilers
    behind that write into the build folder. A session holds them all. Repeated: one may start another.
    """
    while members := list(_session_members(leader.pid)):
        for member in members:
            try:
                os.kill(member, signal.SIGKILL)
            except ProcessLookupError:
                continue
    leader.communicate()


def _session_members(session: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name in parentheses, which may hold anything: state, parent, group, session (proc(5)).
            state, _, _, found, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(found) == session and state not in "ZX":
            yield int(folder.name)
