# SPDX-License-Identifier: Apache-2.0
"""Counters survive the death of their process, and cost next to nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fi_backend import env
from fi_backend.core import counters as counters_module
from fi_backend.core.counters import (
    CALLS,
    LAYERS,
    MOST_STEPS,
    STEPS,
    TOKENS,
    Counters,
    ask_for_steps,
    counters,
    read_builds,
    read_stats,
    total,
)

CHILD = """
import sys
from fi_backend.core.counters import *
counters().name_engine("engine 1.2.3")
counters().add(LAYERS, 2)
for _ in range(5):
    counters().add(STEPS)
    counters().add(CALLS, 2)
print("counted", flush=True)
sys.stdin.read()
"""


def test_counts_survive_sigkill(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env.child_environment(FI_BACKEND_STATS_DIR=str(tmp_path)),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"counted\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    (stats,) = read_stats(tmp_path)
    assert (stats.pid, stats.engine) == (child.pid, "engine 1.2.3")
    assert (stats.layers, stats.steps, stats.attention_calls) == (2, 5, 10)


def test_counts_are_read_while_the_process_runs(tmp_path: Path) -> None:
    mine = Counters(tmp_path)
    mine.add(TOKENS, 7)
    assert read_stats(tmp_path)[0].tokens == 7
    mine.add(TOKENS, 2**40)
    assert read_stats(tmp_path) == [mine.snapshot()]
    assert mine.snapshot().tokens == 7 + 2**40


def test_counts_without_a_folder_stay_in_memory(tmp_path: Path) -> None:
    mine = Counters()
    mine.add(CALLS, 3)
    assert mine.path is None
    assert mine.snapshot().attention_calls == 3


def test_total_sums_processes(tmp_path: Path) -> None:
    first, second = Counters(), Counters()
    first.name_engine("vllm 1")
    second.name_engine("vllm 1")
    first.add(LAYERS, 2)
    second.add(LAYERS, 3)
    second.add(STEPS)
    both = total([first.snapshot(), second.snapshot()])
    assert (both.pid, both.engine, both.layers, both.steps) == (0, "vllm 1", 5, 1)


def test_containers_that_share_a_folder_keep_their_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each container numbers its processes anew, so the same process id counts twice."""
    for host, calls in (("b.example.org", 3), ("a", 5)):
        monkeypatch.setattr(os, "uname", lambda host=host: SimpleNamespace(nodename=host))
        Counters(tmp_path).add(CALLS, calls)
    found = read_stats(tmp_path)
    assert [(stats.host, stats.pid, stats.attention_calls) for stats in found] == [
        ("a", os.getpid(), 5),
        ("b.example.org", os.getpid(), 3),
    ]
    assert total(found).attention_calls == 8


def test_a_file_without_a_host_is_read(tmp_path: Path) -> None:
    """As versions before wrote it."""
    mine = Counters(tmp_path)
    mine.add(STEPS, 4)
    assert mine.path is not None
    mine.path.rename(tmp_path / "17.stats")
    (stats,) = read_stats(tmp_path)
    assert (stats.host, stats.steps) == ("", 4)


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.stats").write_text("something else")
    with pytest.raises(ValueError, match=r"1\.stats: expected 192 bytes"):
        read_stats(tmp_path)


def test_a_folder_that_cannot_be_written_stops_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk is full or read-only when the engine starts a worker: it serves all the same, and says so."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(counters_module, "_current", None)
    monkeypatch.setattr(env, "stats_dir", lambda: tmp_path / "file" / "folder")
    counters().add(CALLS, 3)
    counters().build(["module"])
    assert (counters().path, counters().snapshot().attention_calls) == (None, 3)
    [warning] = caplog.messages
    assert warning.startswith("FI_BACKEND_STATS_DIR: expected a folder that can be written; got ")


def test_steps_are_asked_of_living_processes(tmp_path: Path) -> None:
    mine = Counters(tmp_path)
    mine.add(LAYERS)
    assert mine.path is not None
    header = bytearray(mine.path.read_bytes())
    header[8:16] = (2**63).to_bytes(8, sys.byteorder)  # no such process: a file that was written over
    mine.path.with_name(f"{os.uname().nodename}.7.stats").write_bytes(header)
    assert [each.stats.pid for each in ask_for_steps(tmp_path, MOST_STEPS)] == [os.getpid()]
    assert mine.wanted_steps == MOST_STEPS
    for count in (0, MOST_STEPS + 1, 10**30):
        with pytest.raises(ValueError, match=rf"^count: expected 1 to {MOST_STEPS} steps; got {count}$"):
            ask_for_steps(tmp_path, count)
    assert mine.wanted_steps == MOST_STEPS


def test_names_of_modules_are_read_whatever_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.1.builds").write_bytes(b"\xff\nmodule\n")
    assert read_builds(tmp_path)[1] == "module"


def test_a_forked_child_counts_for_itself(tmp_path: Path) -> None:
    code = """
import os
from fi_backend.core.counters import CALLS, counters
counters().add(CALLS)
if os.fork() == 0:
    counters().add(CALLS, 5)
    os._exit(0)
os.wait()
"""
    environment = env.child_environment(FI_BACKEND_STATS_DIR=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert sorted(stats.attention_calls for stats in read_stats(tmp_path)) == [1, 5]


def test_add_costs_as_little_as_a_few_calls(tmp_path: Path) -> None:
    """Less than a microsecond where a call takes 33 ns; a slow or busy machine takes longer for both."""
    mine = Counters(tmp_path)
    calls: dict[str, Callable[[], None]] = {"add": lambda: mine.add(CALLS), "nothing": lambda: None}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(20):
        for name, call in calls.items():
            seconds[name].append(timeit.timeit(call, timer=time.thread_time, number=5_000))
    assert min(seconds["add"]) < 30 * min(seconds["nothing"])
    assert mine.path is not None
    assert os.path.getsize(mine.path) == 192
