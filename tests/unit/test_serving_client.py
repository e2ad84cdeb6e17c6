# SPDX-License-Identifier: Apache-2.0
"""The load generator against a server in a thread: both interfaces, errors, its own lag, giving up."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from serving_fake import FakeServer

from fi_backend.benchmarks.serving.client import LoadRun, run_load
from fi_backend.benchmarks.serving.engines import ENGINES
from fi_backend.benchmarks.serving.protocols import Outcome, Protocol, Request

PROTOCOLS = {name: kind.protocol for name, kind in ENGINES.items()}


def load(
    tmp_path: Path, protocol: Protocol, requests: list[Request], *, kind: type = FakeServer, **options: Any
) -> LoadRun:
    server = kind(
        "m", ["--attention-backend=X"], environment={"FI_BACKEND_STATS_DIR": "/none"}, log=tmp_path / "log"
    )
    with server:
        return run_load(server.url, protocol, "m", requests, **options)


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("samples", [1, 3])
def test_a_stream_is_read(tmp_path: Path, name: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server waits for the client, so that pieces come apart also where a client waits for a core."""
    protocol, read = PROTOCOLS[name], []
    original = protocol.read

    def noted(outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        original(outcome, event, now)
        read.append(now)

    monkeypatch.setattr(protocol, "read", noted)
    requests = [Request([5, 6], 4, at=0.05 * index, samples=samples) for index in range(3)]
    waiting = type("Waiting", (FakeServer,), {"read": read})
    run = load(tmp_path, protocol, requests, kind=waiting)
    for request, outcome in zip(requests, run.outcomes, strict=True):
        assert outcome.error is None
        assert outcome.finished
        assert outcome.tokens == [0, 1, 2, 3]
        assert outcome.count == 4 * samples
        assert [len(times) for times in outcome.times] == [4] * samples
        # All of them count from the moment at which the request was due.
        assert all(0.001 < times[0] < times[-1] <= run.seconds - request.at for times in outcome.times)
        assert outcome.sent is not None
        assert outcome.first is not None
        assert 0 <= outcome.sent < outcome.first
    assert run.seconds >= 0.1
    assert run.loop_lags
    body = waiting.bodies[0]
    sampling = body if name == "vllm" else body["sampling_params"]
    assert (sampling.get("n", 1), sampling["temperature"] > 0) == (samples, samples > 1)
    assert sampling["ignore_eos"] is True


@pytest.mark.parametrize(
    ("change", "words"),
    [({"fails": 503}, "status 503: overloaded"), ({"cut": 2}, "the stream ended after 2 tokens")],
)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_failure_is_an_outcome(tmp_path: Path, name: str, change: dict[str, int], words: str) -> None:
    kind = type("Failing", (FakeServer,), change)
    [outcome] = load(tmp_path, PROTOCOLS[name], [Request([1], 4)], kind=kind).outcomes
    assert outcome.error == words
    assert not outcome.finished


@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_event_of_another_protocol_is_an_error(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that nobody asked for ends the reading; it must not pass for one on its way."""
    protocol = PROTOCOLS[name]
    original = protocol.read

    def more(outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        events = (
            {"choices": [{"index": 7, "token_ids": [1]}]},
            {"index": 7, "meta_info": {"completion_tokens": 1}},
        )
        original(outcome, events[name == "sglang"], now)

    monkeypatch.setattr(protocol, "read", more)
    [outcome] = load(tmp_path, protocol, [Request([5], 4)]).outcomes
    assert outcome.error is not None
    assert outcome.error.startswith(f"expected events of {protocol.path}; got one that is none: IndexError")


@pytest.mark.parametrize(("error", "told"), [(KeyboardInterrupt, False), (OSError, True)])
def test_an_interruption_inside_a_task_is_not_reported_as_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
    told: bool,
) -> None:
    """Ctrl-C may come while a task runs that nobody waits for; asyncio told of it at the end."""

    async def lost() -> None:
        raise error

    protocol = PROTOCOLS["vllm"]
    original = protocol.read

    def read(outcome: Outcome, event: Mapping[str, Any], now: float) -> None:
        if not outcome.count:
            asyncio.get_running_loop().create_task(lost())
        original(outcome, event, now)

    monkeypatch.setattr(protocol, "read", read)
    with nullcontext() if told else pytest.raises(KeyboardInterrupt):
        load(tmp_path, protocol, [Request([5], 4)])
    gc.collect()
    assert ("never retrieved" in caplog.text) == told


def test_no_server_is_an_outcome() -> None:
    [outcome] = run_load("http://127.0.0.1:9", PROTOCOLS["vllm"], "m", [Request([1], 4)]).outcomes
    assert outcome.error is not None
    assert "Connect" in outcome.error


def test_a_slow_server_does_not_slow_the_arrivals(tmp_path: Path) -> None:
    """Open loop: a client that waits for an answer would never send the last of ten, and get no answer."""
    kind = type("Slow", (FakeServer,), {"first": 0.4, "crowd": 10})
    requests = [Request([1], 1, at=0.02 * index) for index in range(10)]
    run = load(tmp_path, PROTOCOLS["vllm"], requests, kind=kind, timeout=300)
    assert [outcome.error for outcome in run.outcomes] == [None] * 10
    firsts = [outcome.first or 0.0 for outcome in run.outcomes]
    assert max(firsts) > 3.5  # whichever comes last waits for nine others, not for the client
    sent = max(each.at + (outcome.sent or 0.0) for each, outcome in zip(requests, run.outcomes, strict=True))
    assert sent < min(each.at + first for each, first in zip(requests, firsts, strict=True))


def test_a_client_that_sleeps_shows_its_lag(tmp_path: Path) -> None:
    """What blocks the client's loop is seen in `sent` and in the latency itself."""
    blocked = []

    def block(_run: LoadRun, _now: float) -> None:
        if not blocked:
            blocked.append(time.sleep(0.4))

    requests = [Request([1], 1, at=0.05 * index) for index in range(40)]
    run = load(tmp_path, PROTOCOLS["vllm"], requests, watch=block)
    worst = max(range(40), key=lambda index: run.outcomes[index].sent or 0.0)
    assert (run.outcomes[worst].sent or 0.0) > 0.25
    assert (run.outcomes[worst].first or 0.0) > (run.outcomes[worst].sent or 0.0)


def test_a_lost_rate_is_given_up(tmp_path: Path) -> None:
    kind = type("Slow", (FakeServer,), {"first": 0.3})
    requests = [Request([1], 50, at=0.01 * index) for index in range(100)]
    began = time.perf_counter()
    run = load(tmp_path, PROTOCOLS["vllm"], requests, kind=kind, give_up=(0.2, 3))
    assert run.stopped
    assert time.perf_counter() - began < 100 * 0.3, "all of them would take longer"
    assert all(outcome.error is None for outcome in run.outcomes)
    assert sum(outcome.stopped is not None for outcome in run.outcomes) > 50
    assert run.late(0.2, run.seconds, requests) > 3


def test_the_collector_rests_while_requests_are_under_way(tmp_path: Path) -> None:
    seen: list[bool] = []
    load(
        tmp_path,
        PROTOCOLS["vllm"],
        [Request([1], 1, at=0.05 * index) for index in range(20)],
        watch=lambda _run, _now: seen.append(gc.isenabled()),
    )
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_a_client_hangs_up(tmp_path: Path) -> None:
    [outcome] = load(tmp_path, PROTOCOLS["vllm"], [Request([1], 500, abort_after=3)]).outcomes
    assert outcome.error is None
    assert not outcome.finished
    assert len(outcome.tokens) == 3
