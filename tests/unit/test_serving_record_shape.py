# SPDX-License-Identifier: Apache-2.0
"""Damaged and foreign records are refused, with the field that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving_records import record
from typer.testing import CliRunner

from fi_backend.benchmarks.serving.records import read_record
from fi_backend.cli.main import app

RUN = CliRunner()


def _damaged(place: str, value: Any) -> dict[str, Any]:
    """A record in which the field at `place` is another one."""
    made = record()
    *path, last = place.split(".")
    at: Any = made
    for name in path:
        at = at[int(name)] if isinstance(at, list) else at[name]
    at[last] = value
    return made


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("backends", None, "backends: expected a list; got 'None'"),
        ("backends.0.points", [7], "backends[0].points[0]: expected an object; got '7'"),
        ("backends.0.command", "vllm", "backends[0].command: expected a list; got 'vllm'"),
        ("backends.1.sustained", {"rate": 1}, "backends[1].sustained: expected a field failed; got rate"),
        ("backends.0.builds", {"before_ready": "<b>", "after_ready": []}, "before_ready: expected a number"),
        ("backends.0.points.0.requests", "<script>", "fi: a row.requests: expected a number; got '<script>'"),
        ("backends.0.points.0.rate", float("inf"), "fi: a row.rate: expected a number; got 'inf'"),
        ("backends.0.points.0.errors", True, "fi: a row.errors: expected a number; got 'True'"),
        ("backends.0.points.0.ttft_ms.p99", ["<i>", 1, 2], "fi: a row.ttft_ms.p99[0]: expected a number"),
        ("backends.0.points.0.ttft_ms.p99", [1.5], "fi: a row.ttft_ms.p99: expected 3 values; got 1"),
        ("backends.0.points.0.runs", 10**400, "fi: a row.runs: expected a number"),
        ("backends.0.points.0.balance.steps", [{}], "fi: a row.balance.steps[0]: expected a field requests"),
        ("backends.0.points.0.requests", 0, "fi: a row: expected rate, runs and requests > 0; got 0"),
        ("settings", [], "settings: expected an object; got '[]'"),
        ("settings", {}, "settings: expected a field seed"),
        (
            "objectives.0.metric",
            "e2e_ms",
            "objectives[0].metric: expected one of ttft_ms, itl_ms; got 'e2e_ms'",
        ),
        ("objectives.0.percent", 95, "objectives[0].percent: expected one of 50, 90, 99; got '95'"),
        ("objectives", [{"metric": "x"}], "objectives[0]: expected a field percent; got metric"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, place: str, value: Any, words: str) -> None:
    """Of a foreign or damaged file nothing is pooled, drawn or shown: numbers stand in the page unescaped."""
    (tmp_path / "record.json").write_text(json.dumps(_damaged(place, value)))
    with pytest.raises(ValueError, match=r"record\.json: ") as caught:
        read_record(tmp_path / "record.json")
    assert words in str(caught.value)
    result = RUN.invoke(app, ["bench", "report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 2
    assert not (tmp_path / "page.html").exists()
