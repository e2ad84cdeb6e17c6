# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled modules: names, locks, and installing a finished module in one step."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fi_backend.core.jit.key import module_key
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.ninja_file import LIBRARY
from fi_backend.core.jit.progress import say
from fi_backend.env import CACHE_DIR
from fi_backend.errors import BuildError

_STALE_S = 3600.0


def module_folder(spec: ModuleSpec, cache_dir: Path, *, portable: bool = False) -> Path:
    """Return the folder in which the module lies, or will lie, that this machine's compilers make."""
    return cache_dir / f"{spec.name}-{module_key(spec, cache_dir, portable=portable)[:16]}"


def is_built(folder: Path) -> bool:
    """Return whether `folder` holds a finished module."""
    return (folder / LIBRARY).is_file()


def is_writable(cache_dir: Path) -> bool:
    """Return whether modules can be added to the cache, which need not exist yet."""
    existing = next(path for path in (cache_dir, *cache_dir.parents) if path.exists())
    return os.access(existing, os.W_OK | os.X_OK)


@contextmanager
def locked(folders: list[Path]) -> Iterator[None]:
    """Hold the locks of `folders` against other processes, taken in one order so that none waits in a circle.

    A file system without working locks is tolerated: installing is one atomic rename, so the only loss is
    that two processes may compile the same module. Raises BuildError if the cache cannot be written.
    """
    with ExitStack() as stack:
        for folder in sorted(folders):
            lock = FileLock(folder.with_name(f".{folder.name}.lock"))
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                _acquire(lock, folder)
            except (OSError, NotImplementedError) as error:
                if not os.access(folder.parent, os.W_OK | os.X_OK):
                    raise _not_writable(folder.parent, error) from error
            else:
                stack.callback(lock.release)
        yield


def _acquire(lock: FileLock, folder: Path) -> None:
    try:
        lock.acquire(timeout=0.5)
    except Timeout:
        say(f"waiting for another process that compiles {folder.name}")
        lock.acquire()


@contextmanager
def scratch(cache_dir: Path) -> Iterator[Path]:
    """Give a fresh folder beside the modules (renaming must not cross file systems), removed at the end."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".build-{socket.gethostname()}-{os.getpid()}-", dir=cache_dir))
    except OSError as error:
        raise _not_writable(cache_dir, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(built: Path, folder: Path) -> None:
    """Move the finished module `built` to `folder` in one step; a module that is there already stays."""
    for file in built.iterdir():
        if file.is_file():
            _sync(file)
    _sync(built)
    for _ in range(2):
        try:
            built.rename(folder)
        except OSError:
            if is_built(folder):
                return  # Another process without a working lock was faster; the key says it is the same.
            # A folder without a library is no module: somebody removed files by hand.
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _sync(folder.parent)
            return
    raise BuildError(f"module {folder.name}: cannot move {built} to {folder}; remove that folder")


def sweep(cache_dir: Path) -> None:
    """Remove build folders that killed processes left behind more than an hour ago."""
    for folder in cache_dir.glob(".build-*"):
        try:
            if time.time() - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_writable(cache_dir: Path, error: Exception) -> BuildError:
    return BuildError(
        f"cache folder {cache_dir} cannot be written ({error}); set {CACHE_DIR.name} to a folder that can, "
        "or compile ahead of time with `fi-backend build` where it can"
    )
