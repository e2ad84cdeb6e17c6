# SPDX-License-Identifier: Apache-2.0
"""The life of a module: found in the cache, or built under a lock; then loaded once a process."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fi_backend import env
from fi_backend.core.counters import counters
from fi_backend.core.jit import cache
from fi_backend.core.jit.ffi import tvm_ffi
from fi_backend.core.jit.locate import Place, locate, must_be_built
from fi_backend.core.jit.manifest import Manifest
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.ninja_file import LIBRARY, Target, run_build_file, write_build_file
from fi_backend.core.jit.openmp import ensure_runtime
from fi_backend.core.jit.progress import build_progress
from fi_backend.errors import BuildError

if TYPE_CHECKING:
    from tvm_ffi import Module

_OUTPUT_LINES = 40
_LOG_NAME_CHARS = 100
_loaded: dict[ModuleSpec, Module] = {}
_loading = threading.RLock()


def load(spec: ModuleSpec) -> Module:
    """Return the loaded module of `spec`, compiling it first if the cache lacks it; loaded once a process.

    The functions that its binding exports are attributes of the result. Raises BuildError if it cannot
    be built or loaded, or if it would have to be built and FI_BACKEND_DISABLE_JIT forbids it.
    """
    with _loading:
        if (module := _loaded.get(spec)) is None:
            [library] = build_all([spec])
            if spec.arch == "cpu":
                ensure_runtime()
            try:
                module = _loaded[spec] = tvm_ffi().load_module(str(library))
            except (OSError, RuntimeError) as error:
                raise BuildError(
                    f"module {spec.name}: {library} cannot be loaded here ({error}); if it was compiled on "
                    f"another machine, remove {library.parent} and run `{spec.build_command}` on one with "
                    "system libraries that are not newer than this one's"
                ) from error
        return module


def build_all(
    specs: Iterable[ModuleSpec], *, portable: bool = False, cache_dir: Path | None = None
) -> list[Path]:
    """Build what the cache lacks of `specs`, all in one parallel run; return the libraries in their order.

    A module that another machine compiled is taken where this one cannot compile, or would make the same
    one. portable: build CPU modules for the instructions that all current servers have; cache_dir: in
    place of the environment's.
    Raises BuildError with the failing command, the head of its output and the path of the full log;
    modules that did build are kept.
    """
    specs = list(specs)
    # ninja runs in a folder of its own, where a relative path would name another place.
    cache_dir = (cache_dir or env.cache_dir()).absolute()
    places = {spec: locate(spec, cache_dir, portable=portable) for spec in specs}
    missing = {spec: place for spec, place in places.items() if place.ready is None}
    if missing:
        targets = must_be_built(missing, cache_dir)
        with cache.locked(list(targets.values())):
            # Whoever held the lock before may have built them.
            targets = {spec: folder for spec, folder in targets.items() if not cache.is_built(folder)}
            if targets:
                _build(targets, cache_dir, portable)
    return [_library(place) for place in places.values()]


def _library(place: Place) -> Path:
    folder = place.ready or place.target
    assert folder is not None, "must_be_built() raises for a module that can neither be found nor built"
    return folder / LIBRARY


def _build(missing: dict[ModuleSpec, Path], cache_dir: Path, portable: bool) -> None:
    # Before they are compiled, so that whoever measures meanwhile sees it.
    counters().build([spec.name for spec in missing])
    cache.sweep(cache_dir)
    with cache.scratch(cache_dir) as scratch:
        targets = [Target(spec, scratch / folder.name, portable) for spec, folder in missing.items()]
        for target in targets:
            target.folder.mkdir()
        objects = write_build_file(scratch / "build.ninja", targets)
        log = scratch / "build.log"
        with build_progress([target.spec.name for target in targets], objects) as on_step:
            status = run_build_file(scratch / "build.ninja", on_step, log)
            failed = [target for target in targets if not target.library.is_file()]
            for target in targets:
                if target not in failed:
                    for intermediate in target.folder.glob("*.o"):
                        intermediate.unlink()
                    shutil.copy(log, target.folder / "build.log")
                    Manifest.of_build(target.spec, cache_dir, portable=portable).write(target.folder)
                    cache.install(target.folder, missing[target.spec])
            if status != 0 or failed:
                raise _failure([target.spec.name for target in failed], status, log, cache_dir)


def _log_name(names: list[str]) -> str:
    # Names of modules are as long as their variants: file systems allow 255 bytes, of which this takes half.
    if not names:
        return "build.log"
    first, others = names[0][:_LOG_NAME_CHARS], len(names) - 1
    if first == names[0] and not others:
        return f"{first}.log"
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{first}-and-{others}-more-{digest}.log" if others else f"{first}-{digest}.log"


def _failure(names: list[str], status: int, log: Path, cache_dir: Path) -> BuildError:
    text = log.read_text(errors="replace")
    kept = cache_dir / "logs" / _log_name(names)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(text)
    # ninja prints: "FAILED: [code=1] <output>", the command on the next line, then the compiler's output.
    match = re.search(
        r"^FAILED: .*\n(.*)\n((?:(?!^\[\d+/\d+\] |^FAILED: |^ninja: ).*\n?)*)", text, re.MULTILINE
    )
    command, output = (match[1], match[2]) if match else ("ninja", text)
    shown = "\n".join(output.rstrip().splitlines()[:_OUTPUT_LINES])
    return BuildError(
        f"cannot build {', '.join(names) or 'the modules'} (ninja exit status {status})\n"
        f"command: {command}\n{shown}\nfull log: {kept}"
    )
