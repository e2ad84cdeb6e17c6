# SPDX-License-Identifier: Apache-2.0
"""Asking serving processes for steps: who is asked, through the file of the counters, and what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_cli_stats import write
from typer.testing import CliRunner

from fi_backend.cli.main import app
from fi_backend.core.counters import LAYERS, Counters, ask_for_steps, read_stats, step_file

RUN = CliRunner()


def serving(folder: Path) -> Counters:
    mine = Counters(folder)
    mine.name_engine("vllm 0.32.0")
    mine.add(LAYERS, 2)
    return mine


def test_a_request_arrives_and_adds_to_those_before(tmp_path: Path) -> None:
    mine = serving(tmp_path)
    assert mine.wanted_steps == 0
    before = mine.snapshot()
    [asked] = ask_for_steps(tmp_path, 3)
    assert mine.wanted_steps == 3
    assert (asked.stats, asked.numbers) == (before, range(1, 4))
    [asked] = ask_for_steps(tmp_path, 2)
    assert mine.wanted_steps == 5
    assert asked.numbers == range(4, 6)
    assert mine.path is not None
    path = step_file(mine.path, 4, 1)
    assert path.parent == tmp_path
    assert path.match(asked.files)
    assert read_stats(tmp_path) == [before], "step files are no counters, and nothing else was written"


def test_who_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have ended, of which files remain, and those without attention layers."""
    write(tmp_path, 12)
    Counters(tmp_path)
    assert len(read_stats(tmp_path)) == 2
    assert ask_for_steps(tmp_path, 1) == []
    # Of a container that shares the folder nobody here can tell.
    with monkeypatch.context() as patch:
        patch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
        [asked] = ask_for_steps(tmp_path, 1)
    assert asked.stats.attention_calls == 12


def test_the_command(tmp_path: Path) -> None:
    mine = serving(tmp_path)
    result = RUN.invoke(app, ["stats", str(tmp_path), "--capture", "2"])
    assert result.exit_code == 0, result.output
    assert f"process {os.getpid()} (vllm 0.32.0) saves step 1 to 2 as it plans: {tmp_path}" in result.stdout
    assert "fi-backend explain --step FILE" in result.stdout
    assert mine.wanted_steps == 2
    document = json.loads(RUN.invoke(app, ["stats", str(tmp_path), "--capture", "1", "--json"]).stdout)
    [asked] = document["asked"]
    assert (asked["pid"], asked["first"], asked["last"]) == (os.getpid(), 3, 3)
    assert asked["files"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--capture", "0"], "--capture: expected 1 to 1000 steps; got 0"),
        (["--capture", "1", "--prometheus"], "--prometheus: expected no --capture beside it"),
        (["--capture", "1"], "DIR: expected a process that runs and counts in"),
    ],
)
def test_mistakes(tmp_path: Path, options: list[str], text: str) -> None:
    write(tmp_path, 12)
    result = RUN.invoke(app, ["stats", str(tmp_path), *options])
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = serving(tmp_path)
    original = Path.open

    def refuse(self: Path, mode: str = "r", *args: object, **named: object) -> object:
        if "+" in mode:
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, mode, *args, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    result = RUN.invoke(app, ["stats", str(tmp_path), "--capture", "1"])
    assert result.exit_code == 2
    assert str(mine.path) in result.stderr
