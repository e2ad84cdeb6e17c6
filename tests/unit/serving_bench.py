# SPDX-License-Identifier: Apache-2.0
"""`bench serve` from its command line, with a server in a thread in place of the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_fake import FakeServer
from typer.testing import CliRunner

from fi_backend.benchmarks.serving import engines
from fi_backend.cli import serve_options
from fi_backend.cli.main import app

RUN = CliRunner()
SMALL = (
    *("--slo-ttft-p99", "60s"),  # nothing here depends on how busy the machine is
    *("--workload", "uniform:in=20,out=4", "--requests", "10", "--runs", "2", "--device", "cpu"),
    *("--warm-up", "2"),
)


def bench(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    *arguments: str,
    server: type[FakeServer] = FakeServer,
    **changes: Any,
) -> Any:
    """Run it with `server`, of which `changes` replace attributes."""
    kind = type("Fake", (server,), changes)
    for name, known in engines.ENGINES.items():
        monkeypatch.setitem(engines.ENGINES, name, replace(known, server=kind))
    monkeypatch.setattr(serve_options, "check_engine", lambda _engine: None)
    return RUN.invoke(app, ["bench", "serve", *SMALL, "--out", str(out), *arguments])
