# SPDX-License-Identifier: Apache-2.0
"""The load generator: sends requests at given times whatever the server does, and watches its own delay."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fi_backend.benchmarks.serving.protocols import Outcome, Protocol, Request

_TICK = 0.02


@dataclass
class LoadRun:
    """outcomes: one a request, in order. seconds: from the first to the end of the last answer.

    loop_lags: seconds by which the event loop woke later than it had asked for, sampled all the time: what
    the clock of an arriving token may be off by. stopped: the run was ended early.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    loop_lags: list[float] = field(default_factory=list)
    stopped: bool = False

    def late(self, limit: float, now: float, requests: Sequence[Request]) -> int:
        """Return how many requests had, or have by `now`, no first token within `limit` seconds."""
        count = 0
        for request, outcome in zip(requests, self.outcomes, strict=True):
            first = outcome.first
            waited = now - request.at if first is None and outcome.error is None else first or 0.0
            count += waited > limit
        return count


def run_load(
    url: str,
    protocol: Protocol,
    model: str,
    requests: Sequence[Request],
    *,
    timeout: float = 600.0,
    give_up: tuple[float, int] | None = None,
    watch: Callable[[LoadRun, float], None] = lambda _run, _now: None,
) -> LoadRun:
    """Send every request at its time and wait for all answers.

    url: of the server. timeout: seconds for one request. give_up: (seconds, requests): stop as soon as more
    than that many requests have waited longer than that for their first token. watch: called about twice a
    second with the state and the seconds passed. Errors of single requests are in their outcomes.
    """
    with _no_collection():
        return asyncio.run(_run(url, protocol, model, requests, timeout, give_up, watch))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's cycle collector from running: over torch's heap it takes tenths of seconds."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _run(
    url: str,
    protocol: Protocol,
    model: str,
    requests: Sequence[Request],
    timeout: float,
    give_up: tuple[float, int] | None,
    watch: Callable[[LoadRun, float], None],
) -> LoadRun:
    asyncio.get_running_loop().set_exception_handler(_not_interruptions)
    run = LoadRun([Outcome(request.samples) for request in requests])
    # Encoded before the clock starts: a long prompt takes milliseconds.
    bodies = [json.dumps(protocol.body(model, request)).encode() for request in requests]
    limits = aiohttp.ClientTimeout(total=timeout)
    # No limit on connections: a request that waits for one would look like a slow server.
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        tasks = [
            asyncio.create_task(_one(session, url + protocol.path, protocol, body, request, outcome, start))
            for body, request, outcome in zip(bodies, requests, run.outcomes, strict=True)
        ]
        watcher = asyncio.create_task(_watch(run, requests, tasks, start, give_up, watch))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        run.seconds = time.perf_counter() - start
        for outcome, end in zip(run.outcomes, ends, strict=True):
            # An event that is none of the protocol's: neither an answer nor silence.
            if isinstance(end, Exception) and outcome.error is None:
                outcome.error = f"expected events of {protocol.path}; got one that is none: {end!r}"
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return run


def _not_interruptions(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Leave out interruptions, which end the loop: a task of aiohttp's that met one has nobody to tell."""
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)


async def _watch(
    run: LoadRun,
    requests: Sequence[Request],
    tasks: Sequence[asyncio.Task[None]],
    start: float,
    give_up: tuple[float, int] | None,
    watch: Callable[[LoadRun, float], None],
) -> None:
    shown = 0.0
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(_TICK)
        now = time.perf_counter()
        run.loop_lags.append(max(0.0, now - asked - _TICK))
        if now - shown > 0.5:
            shown = now
            watch(run, now - start)
        if give_up and run.late(give_up[0], now - start, requests) > give_up[1]:
            run.stopped = True
            for request, outcome, task in zip(requests, run.outcomes, tasks, strict=True):
                if not task.done():
                    outcome.stopped = now - start - request.at
                    task.cancel()
            return


async def _one(
    session: aiohttp.ClientSession,
    url: str,
    protocol: Protocol,
    body: bytes,
    request: Request,
    outcome: Outcome,
    start: float,
) -> None:
    due = start + request.at
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    outcome.sent = time.perf_counter() - due
    try:
        headers = {"Content-Type": "application/json"}
        async with session.post(url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"status {response.status}: {(await response.text())[:300]}"
                return
            rest = b""
            # Whatever has arrived at once: waking up for every line costs more than reading it.
            async for chunk in response.content.iter_any():
                now = time.perf_counter() - due
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = line.strip().removeprefix(b"data: ")
                    if event.startswith(b"{"):
                        protocol.read(outcome, json.loads(event), now)
                    if request.abort_after is not None and len(outcome.tokens) >= request.abort_after:
                        response.close()
                        return
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.error is None and not outcome.finished:
        outcome.error = f"the stream ended after {outcome.count} tokens"
