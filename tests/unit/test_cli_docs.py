# SPDX-License-Identifier: Apache-2.0
"""docs/cli.md: its commands parse, its file is a step, its plug-in registers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fi_backend.cli.main import app
from fi_backend.core.step import load_step
from fi_backend.hooks import Plugins

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()
COMMANDS = re.findall(r"^fi-backend (.+)$", TEXT, re.MULTILINE)
RUN = CliRunner()


def block(language: str, containing: str) -> str:
    [found] = [
        text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if containing in text
    ]
    return str(found)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 12


@pytest.mark.parametrize("line", COMMANDS)
def test_a_documented_command_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    ours = words[: words.index("--")] if "--" in words else words  # the rest is the server's
    result = RUN.invoke(app, [*ours, "--help"])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["doctor"],
        ["build"],
        ["bench", "plan"],
        ["bench", "kernels"],
        ["bench", "serve"],
        ["explain"],
        ["stats"],
    ],
)
def test_every_option_has_a_help_text(command: list[str]) -> None:
    out = RUN.invoke(app, [*command, "--help"]).stdout
    options = re.findall(r"^ +--[\w-]+.*$", out, re.MULTILINE)
    assert options
    for index, line in enumerate(options):
        # The text stands after two blanks, or on the next line when the option is long.
        following = out.split(line, 1)[1].splitlines()[1:2]
        assert re.search(r"\S {2,}\S", line) or following[0].strip(), (index, line)


def test_the_documented_step_loads(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(block("json", "qo_indptr"))
    step = load_step(path)
    assert (step.block_table, step.num_ctas) == ([[7, 3, 9], [7, 5]], 132)


def test_the_documented_plugin_registers() -> None:
    names: dict[str, Any] = {"__name__": "documented"}
    exec(compile(block("python", "class MyAttention"), "cli.md", "exec"), names)
    plugin = type(
        "Plugin", (), {"fi_backend_benchmark_peers": staticmethod(names["fi_backend_benchmark_peers"])}
    )
    registered = Plugins()
    registered.register(plugin, "documented")
    assert [peer.name for peer in registered.peers("cpu")] == ["mine"]
