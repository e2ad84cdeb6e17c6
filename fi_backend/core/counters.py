# SPDX-License-Identifier: Apache-2.0
"""Counts what the back end really did in each process, so that a silent fall-back cannot pass for a run.

With FI_BACKEND_STATS_DIR set, the counts live in the memory-mapped file ``<dir>/<host>.<pid>.stats`` and
are updated in place: they can be read while the process runs and survive its SIGKILL. The host
keeps containers apart that share the folder and, each with a numbering of its own, process ids.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from fi_backend import env

_MAGIC: Final = b"FISTATS2"
_HEADER: Final = struct.Struct("8sQ48s")  # magic, process id, engine name
_WORD: Final = struct.Struct("Q")
_SIZE: Final = 192
_COUNTS_AT: Final = _HEADER.size
_NAMES: Final = ".builds"
# A typing error of --capture must not fill the disk of the machine that serves.
MOST_STEPS: Final = 1000

_log = logging.getLogger(__name__)

STEPS, PLANS, CALLS, TOKENS, APPENDED, LAYERS, REPLAYED, CAPTURED = range(8)
SHARED_PLANS, PREFIX_NODES, KV_TOKENS_SAVED, KV_BYTES_SAVED = range(8, 12)
BUILDS = 12
STEP_FILES = 13
# Written by ask_for_steps() alone, in another process: how many steps have been asked for in all.
_WANTED_STEPS = 14


@dataclass(frozen=True)
class ProcessStats:
    """The counts of one process.

    pid, engine: the process and the serving engine it belongs to, as "name version".
    layers: attention layers that were built on this back end.
    steps: batches that were planned; plans: plans made for them, one for each kind of layer.
    attention_calls: attention calls that Python made and that really ran.
    tokens: query tokens of those calls and of the replayed ones.
    appended_tokens: tokens written to KV caches by calls from Python; a replayed graph writes more.
    replayed_calls: attention calls of planned steps that a captured CUDA graph served. captured_calls: those
        that were recorded into a graph. Together with attention_calls layers x steps, unless a draft model
        takes part.
    shared_plans: plans in which prefixes are read once for several requests; prefix_nodes: these prefixes.
    kv_tokens_saved: KV tokens that are therefore not read again, for one KV head of one layer.
    kv_bytes_saved: K and V of these, of all heads and layers. What a GPU plans is counted some steps later,
        see ShareTally.
    builds: native modules that the process began to compile; read_builds() has their names.
    step_files: steps that were saved, see ask_for_steps().
    host: name of the host or container, from the file's name; "" for counts that were not read from a file.
    """

    pid: int
    engine: str
    steps: int
    plans: int
    attention_calls: int
    tokens: int
    appended_tokens: int
    layers: int
    replayed_calls: int = 0
    captured_calls: int = 0
    shared_plans: int = 0
    prefix_nodes: int = 0
    kv_tokens_saved: int = 0
    kv_bytes_saved: int = 0
    builds: int = 0
    step_files: int = 0
    host: str = ""


class Counters:
    """The counts of this process: `add` takes well under a microsecond and never fails."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path: Path | None = None
        self._buffer: mmap.mmap | bytearray = bytearray(_blank())
        if folder is not None:
            self.path = folder / f"{_host_name()}.{os.getpid()}.stats"
            # Of a process before that had this number, as in containers.
            self.path.with_suffix(_NAMES).unlink(missing_ok=True)
            self._buffer = _create(self.path)
        self._counts = memoryview(self._buffer)[_COUNTS_AT:].cast("Q")

    def add(self, index: int, amount: int = 1) -> None:
        """Add `amount` to one of the counts named by this module's constants."""
        self._counts[index] += amount

    def name_engine(self, engine: str) -> None:
        """Record the engine, as "name version", that this process serves."""
        _HEADER.pack_into(self._buffer, 0, _MAGIC, os.getpid(), engine.encode()[:48])

    def build(self, names: Sequence[str]) -> None:
        """Count native modules that are about to be compiled, and keep their names beside the counts."""
        # A full disk must fail the compiler, which says so, not the counting.
        if self.path is not None:
            with contextlib.suppress(OSError), self.path.with_suffix(_NAMES).open("a") as file:
                file.writelines(f"{name}\n" for name in names)
        self.add(BUILDS, len(names))

    @property
    def wanted_steps(self) -> int:
        """How many steps of each plan this process has ever been asked to save; see ask_for_steps()."""
        return self._counts[_WANTED_STEPS]

    def snapshot(self) -> ProcessStats:
        """Return the counts of now."""
        return _parse(bytes(self._buffer), _host(self.path))


_current: Counters | None = None


def counters() -> Counters:
    """Return the counters of this process, made on the first call.

    Where the folder cannot be written the log says so, and the process counts for itself: serving goes on.
    """
    global _current
    if _current is None:
        folder = env.stats_dir()
        try:
            _current = Counters(folder)
        except OSError as error:
            _log.warning(
                "%s: expected a folder that can be written; got %s (%s). `fi-backend stats` will not show "
                "this process; name another folder and start it again.",
                *(env.STATS_DIR.name, folder, error.strerror),
            )
            _current = Counters()
    return _current


def read_stats(folder: Path) -> list[ProcessStats]:
    """Return the counts of every process that ran with FI_BACKEND_STATS_DIR=`folder`, by host and
    process id.

    Raises ValueError, naming the file, for a ``.stats`` file that this version did not write.
    """
    found = [_read(path) for path in folder.glob("*.stats")]
    return sorted(found, key=lambda stats: (stats.host, stats.pid))


def read_builds(folder: Path) -> list[str]:
    """Return the names of the native modules that processes with FI_BACKEND_STATS_DIR=`folder` began to
    compile, process by process in the order of their files' names.
    """
    files = sorted(folder.glob(f"*{_NAMES}"))
    return [name for path in files for name in path.read_text(errors="replace").splitlines()]


@dataclass(frozen=True)
class AskedProcess:
    """A process that was asked to save steps: its counts, and where it saves the steps `numbers`.

    files: pattern of the names of all of them.
    """

    stats: ProcessStats
    numbers: range
    files: str


def ask_for_steps(folder: Path, count: int) -> list[AskedProcess]:
    """Ask the processes that count in `folder` to save the next `count` steps of each of their plans there.

    count: 1 to MOST_STEPS. They see it at their next plan, in the file of their counters. Returns those
    asked: none that has ended, and none without attention layers. Raises ValueError for another count and
    naming a foreign file, OSError for one that cannot be written.
    """
    if not 1 <= count <= MOST_STEPS:
        raise ValueError(f"count: expected 1 to {MOST_STEPS} steps; got {count}")
    asked = []
    for path in sorted(folder.glob("*.stats")):
        stats = _read(path)
        if not stats.layers or _has_ended(stats):
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), _SIZE) as mapped:
            at = _COUNTS_AT + 8 * _WANTED_STEPS
            (before,) = _WORD.unpack_from(mapped, at)
            _WORD.pack_into(mapped, at, before + count)
        numbers = range(before + 1, before + 1 + count)
        asked.append(AskedProcess(stats, numbers, f"{path.stem}.step*.json"))
    return asked


def step_file(path: Path, number: int, plan: int) -> Path:
    """Return the file of a saved step, beside the counters in `path`.

    number: of all steps that were asked for, from 1. plan: numbers the plans of a process, of which there is
    one for each kind of layer.
    """
    return path.with_suffix(f".step{number}.{plan}.json")


def _has_ended(stats: ProcessStats) -> bool:
    """Whether a process of this host is no more; those of other hosts and containers may be there."""
    if stats.host != _host_name():
        return False
    try:
        os.kill(stats.pid, 0)
    except (ProcessLookupError, OverflowError):  # no process has a number that large
        return True
    except PermissionError:
        pass
    return False


def total(stats: list[ProcessStats]) -> ProcessStats:
    """Return the sum over processes; pid is 0, host is "", and engine joins the distinct names."""
    counts = [field.name for field in fields(ProcessStats) if field.name not in ("pid", "engine", "host")]
    sums = {name: sum(getattr(each, name) for each in stats) for name in counts}
    return ProcessStats(
        pid=0, engine=", ".join(sorted({each.engine for each in stats if each.engine})), **sums
    )


def _blank() -> bytes:
    return _HEADER.pack(_MAGIC, os.getpid(), b"").ljust(_SIZE, b"\0")


def _create(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete, so that a reader never sees half a header.
    temporary = path.with_suffix(".new")
    temporary.write_bytes(_blank())
    with temporary.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), _SIZE)
    temporary.replace(path)
    return mapped


def _host_name() -> str:
    return os.uname().nodename.replace("/", "_")


def _read(path: Path) -> ProcessStats:
    try:
        return _parse(path.read_bytes(), _host(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _host(path: Path | None) -> str:
    return path.stem.rpartition(".")[0] if path else ""


def _parse(data: bytes, host: str) -> ProcessStats:
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        raise ValueError(f"expected {_SIZE} bytes that start with {_MAGIC.decode()}, got {len(data)} bytes")
    _, pid, engine = _HEADER.unpack_from(data)
    counts = memoryview(data)[_COUNTS_AT:].cast("Q")
    return ProcessStats(
        pid=pid,
        engine=engine.rstrip(b"\0").decode(errors="replace"),
        steps=counts[STEPS],
        plans=counts[PLANS],
        attention_calls=counts[CALLS],
        tokens=counts[TOKENS],
        appended_tokens=counts[APPENDED],
        layers=counts[LAYERS],
        replayed_calls=counts[REPLAYED],
        captured_calls=counts[CAPTURED],
        shared_plans=counts[SHARED_PLANS],
        prefix_nodes=counts[PREFIX_NODES],
        kv_tokens_saved=counts[KV_TOKENS_SAVED],
        kv_bytes_saved=counts[KV_BYTES_SAVED],
        builds=counts[BUILDS],
        step_files=counts[STEP_FILES],
        host=host,
    )


def _forget_after_fork() -> None:
    # A forked child must not count into its parent's file.
    global _current
    _current = None


os.register_at_fork(after_in_child=_forget_after_fork)
