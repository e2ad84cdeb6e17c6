# SPDX-License-Identifier: Apache-2.0
"""`fi-backend stats` over counters of several processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fi_backend import env
from fi_backend.cli import stats as stats_module
from fi_backend.cli.main import app
from fi_backend.core.counters import LAYERS, Counters, ProcessStats

RUN = CliRunner()
_PROGRAM = """
from fi_backend.core.counters import CALLS, LAYERS, STEPS, counters
c = counters()
c.name_engine("vllm 0.32.0")
c.add(CALLS, {calls}); c.add(LAYERS, 4); c.add(STEPS, 3)
"""


def write(folder: Path, *calls: int) -> None:
    for count in calls:
        environment = env.child_environment(
            FI_BACKEND_STATS_DIR=str(folder), PYTHONPATH=os.pathsep.join(sys.path)
        )
        subprocess.run([sys.executable, "-c", _PROGRAM.format(calls=count)], env=environment, check=True)


def test_table_and_totals(tmp_path: Path) -> None:
    write(tmp_path, 12, 24)
    result = RUN.invoke(app, ["stats", str(tmp_path)], env={"COLUMNS": "160"})
    assert result.exit_code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()]
    assert rows[0] == ["pid", "engine", "steps", "attention calls", "layers", "host"]
    column = rows[0].index("attention calls")
    assert sorted(row[column] for row in rows[1:3]) == ["12", "24"]
    assert rows[3][0] == "total"
    assert "36" in rows[3]


def test_json(tmp_path: Path) -> None:
    write(tmp_path, 12, 24)
    document = json.loads(RUN.invoke(app, ["stats", str(tmp_path), "--json"]).stdout)
    assert sorted(each["attention_calls"] for each in document["processes"]) == [12, 24]
    assert {each["engine"] for each in document["processes"]} == {"vllm 0.32.0"}
    assert (document["total"]["attention_calls"], document["total"]["steps"]) == (36, 6)


def test_prometheus(tmp_path: Path) -> None:
    write(tmp_path, 12)
    [file] = tmp_path.glob("*.stats")
    host, _, pid = file.stem.rpartition(".")
    text = RUN.invoke(app, ["stats", str(tmp_path), "--prometheus"]).stdout
    label = f'{{host="{host}",pid="{pid}",engine="vllm 0.32.0"}}'
    assert (
        f"# TYPE fi_backend_attention_calls_total counter\nfi_backend_attention_calls_total{label} 12\n"
        in text
    )
    assert f"# TYPE fi_backend_layers gauge\nfi_backend_layers{label} 4\n" in text
    sample = re.compile(r'[a-z_]+\{host="[^"]+",pid="\d+",engine="[^"]*"\} \d+')
    assert all(line.startswith("# ") or sample.fullmatch(line) for line in text.splitlines())


def test_every_count_is_exported() -> None:
    assert set(stats_module._HELP) == {field.name for field in fields(ProcessStats)} - {
        "pid",
        "engine",
        "host",
    }


def test_steps_without_calls_are_pointed_out(tmp_path: Path) -> None:
    write(tmp_path, 0)
    assert (
        "3 steps were planned and no attention call ran" in RUN.invoke(app, ["stats", str(tmp_path)]).stdout
    )


def test_an_empty_folder(tmp_path: Path) -> None:
    assert "no process has written counters" in RUN.invoke(app, ["stats", str(tmp_path)]).stdout
    assert json.loads(RUN.invoke(app, ["stats", str(tmp_path), "--json"]).stdout)["processes"] == []


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.stats").write_bytes(b"junk")
    result = RUN.invoke(app, ["stats", str(tmp_path)])
    assert result.exit_code == 2
    assert str(tmp_path / "1.stats") in result.stderr


@pytest.mark.parametrize("engine", ['a"b', "a\\b"])
def test_labels_are_escaped(engine: str) -> None:
    text = stats_module.prometheus_text([ProcessStats(7, engine, *([1] * 6), host=engine)])
    escaped = engine.replace("\\", "\\\\").replace('"', '\\"')
    assert f'fi_backend_tokens_total{{host="{escaped}",pid="7",engine="{escaped}"}} 1' in text


def test_numbers_are_whole_however_many_columns_there_are(tmp_path: Path) -> None:
    """What shared prefixes save has twelve digits, and all counts together are wider than a page."""
    counts = Counters(tmp_path)
    for index in range(14):
        counts.add(index, 123_456_789_012 + index)
    lines = RUN.invoke(app, ["stats", str(tmp_path)]).stdout.splitlines()
    assert sum(f"{123_456_789_012 + index}" in lines[1] for index in range(14)) == 14
    narrow = RUN.invoke(app, ["stats", str(tmp_path)], env={"COLUMNS": "80"}).stdout
    assert "…" not in narrow


@pytest.mark.parametrize("count", [0, 10**30])
def test_so_many_steps_are_not_saved(tmp_path: Path, count: int) -> None:
    write(tmp_path, 12)
    result = RUN.invoke(app, ["stats", str(tmp_path), "--capture", str(count)])
    assert result.exit_code == 2
    assert f"--capture: expected 1 to 1000 steps; got {count}" in " ".join(result.stderr.split())


def test_folders_and_engines_are_shown_as_they_are(tmp_path: Path) -> None:
    """Square brackets are markup for the terminal."""
    folder = tmp_path / "[red]"
    folder.mkdir()
    counts = Counters(folder)
    counts.add(LAYERS)
    counts.name_engine("vllm [/x]")
    assert "vllm [/x]" in RUN.invoke(app, ["stats", str(folder)], env={"COLUMNS": "160"}).stdout
    assert str(folder) in RUN.invoke(app, ["stats", str(folder), "--capture", "1"]).stdout
