# SPDX-License-Identifier: Apache-2.0
"""SGLang engines in child processes that report as JSON; see sglang_run.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo_sglang import STUBS
from fi_backend import env
from fi_backend.core.counters import read_stats, total

HERE = Path(__file__).parent
# What tests of the CPU put into the environment of this process, and a GPU must not see.
_OF_THE_CPU = ("SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET", "OMP_NUM_THREADS")
_LAST_WORDS_S = 5


class EngineError(Exception):
    """An engine ended, or took too long; the text is its log."""


def run_engines(
    folder: Path,
    runs: Mapping[str, Mapping[str, Any]],
    *,
    settings: Mapping[str, str],
    stubs: bool = True,
    timeout: float = 3600,
) -> dict[str, dict[str, Any]]:
    """Return {"batches", "seconds", "stats", "log": of all} of each run, or raise EngineError with the log.

    All runs share one child process, which is killed with its children after `timeout` seconds; they write
    where their threads are then into the log. settings: more variables of its environment; stubs: stand-ins
    for what SGLang imports and a CPU has not.
    """
    folder.mkdir(exist_ok=True)
    job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
    job.write_text(
        json.dumps(
            [
                {
                    **run,
                    "environment": {**run.get("environment", {}), env.STATS_DIR.name: str(folder / str(i))},
                }
                for i, run in enumerate(runs.values())
            ]
        )
    )
    plugin = folder / "plugins" / "sabotage_of_fi-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: sabotage-of-fi\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\nsabotage = sglang_sabotage:register\n")
    path = [str(plugin.parent), str(HERE), *([str(STUBS)] if stubs else [])]
    if inherited := os.environ.get("PYTHONPATH"):
        path.append(inherited)
    environment = env.child_environment(PYTHONPATH=os.pathsep.join(path))
    for name in _OF_THE_CPU:
        environment.pop(name, None)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, str(HERE / "sglang_run.py"), str(job), str(result)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONFAULTHANDLER": "1", **settings},
            start_new_session=True,
        )
        try:
            status: int | str = child.wait(timeout)
        except subprocess.TimeoutExpired:
            status = f"no end after {timeout:.0f} s"
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, signal.SIGABRT)
                child.wait(_LAST_WORDS_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(errors="replace")
    if status != 0:
        raise EngineError(f"{text}\nsglang_run.py: {status}")
    results = json.loads(result.read_text())
    for index, each in enumerate(results):
        each["stats"] = total(read_stats(folder / str(index)))
        each["log"] = text
    return dict(zip(runs, results, strict=True))
