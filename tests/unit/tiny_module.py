# SPDX-License-Identifier: Apache-2.0
"""A native module of a few lines, made in a temporary folder, for the tests of the build layer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
