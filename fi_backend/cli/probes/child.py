# SPDX-License-Identifier: Apache-2.0
"""Runs a function in a process of its own, since importing torch or an engine may fail, hang or crash."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from fi_backend.env import child_environment

_ROOT = Path(__file__).resolve().parents[3]
# Appended, not inserted: the parent's order of modules stays.
_BOOT = f"import sys; sys.path.append({str(_ROOT)!r}); from fi_backend.cli.probes.child import main; main()"


def call_in_child(function: str, *, timeout_s: float = 180) -> tuple[Any, str | None]:
    """Call `function`, "module:name" without arguments, in a child process.

    Returns (its JSON-able result, None), or (None, what went wrong): the exception, or how the process
    ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        try:
            run = subprocess.run(
                [sys.executable, "-c", _BOOT, function, str(answer)],
                env=child_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return None, f"gave no answer within {timeout_s:.0f} s"
        if answer.exists():
            document = json.loads(answer.read_text())
            return document["result"], document["error"]
        last = (run.stderr.strip().splitlines() or ["no output"])[-1]
        return None, f"the process ended with status {run.returncode}: {last[:300]}"


def main() -> None:
    """The child's side: argv holds the function and the file for the answer."""
    module, _, name = sys.argv[1].partition(":")
    result, error = None, None
    try:
        result = getattr(importlib.import_module(module), name)()
    except BaseException as problem:  # noqa: BLE001 - even SystemExit of an import is an answer here
        error = "".join(traceback.format_exception_only(problem)).strip()
    Path(sys.argv[2]).write_text(json.dumps({"result": result, "error": error}))
