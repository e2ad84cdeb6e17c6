# SPDX-License-Identifier: Apache-2.0
"""`bench serve` from its command line, with a server in a thread in place of the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving_fake import FakeServer
from typer.testing import CliRunner

from fi_backend.benchmarks.serving import engines
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.protocols import Outcome, Request
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


def virtual_load(
    _url: str, _protocol: Any, _model: str, requests: Sequence[Request], **options: Any
) -> LoadRun:
    """Answers by a clock of its own, whose times follow from the prompts; every tenth waits long."""
    run = LoadRun(
        [Outcome(request.samples, sent=0.001) for request in requests], 2.0, [0.001 * len(requests)]
    )
    for index, (request, outcome) in enumerate(zip(requests, run.outcomes, strict=True)):
        clock = random.Random(sum(request.prompt))
        now = clock.uniform(0.05, 0.2) + (clock.random() < 0.1)
        if options.get("give_up") and index > len(requests) // 2:
            run.stopped, outcome.stopped = True, 1.5
            continue
        for _ in range(request.max_tokens):
            outcome.take(0, [1], now)
            now += clock.uniform(0.01, 0.02)
        outcome.ended = request.samples
    return run
