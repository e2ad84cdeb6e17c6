# SPDX-License-Identifier: Apache-2.0
"""Sends requests to an OpenAI-style server at given times and records when every token came back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Request:
    """prompt: token ids. at: seconds after the start. abort_after: tokens after which the client hangs up."""

    prompt: list[int]
    max_tokens: int
    at: float = 0.0
    abort_after: int | None = None


@dataclass
class Outcome:
    """tokens: ids received; times: seconds after sending at which a piece of the stream arrived.

    error: what went wrong, or None. finished: the server said that the answer is complete.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None
    finished: bool = False


def send(url: str, model: str, requests: Sequence[Request], *, timeout: float = 600.0) -> list[Outcome]:
    """Send all requests, each at its time, and return their outcomes in the same order."""
    return asyncio.run(_send(url, model, requests, timeout))


async def _send(url: str, model: str, requests: Sequence[Request], timeout: float) -> list[Outcome]:
    limits = aiohttp.ClientTimeout(total=timeout)
    # No limit on connections: a request that waits for one would look like a slow server.
    async with aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        tasks = [_one(session, f"{url}/v1/completions", model, request, start) for request in requests]
        return list(await asyncio.gather(*tasks))


async def _one(
    session: aiohttp.ClientSession, url: str, model: str, request: Request, start: float
) -> Outcome:
    outcome = Outcome()
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
    sent = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                outcome.error = f"status {response.status}: {(await response.text())[:300]}"
                return outcome
            async for line in response.content:
                event = line.decode().strip().removeprefix("data: ")
                if event and event != "[DONE]":
                    _take(outcome, json.loads(event), time.perf_counter() - sent)
                if request.abort_after is not None and len(outcome.tokens) >= request.abort_after:
                    response.close()
                    return outcome
    except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if outcome.error is None and not outcome.finished:
        outcome.error = f"the stream ended after {len(outcome.tokens)} tokens"
    return outcome


def _take(outcome: Outcome, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        outcome.error = str(event["error"])[:300]
        return
    for choice in event.get("choices", ()):
        if tokens := choice.get("token_ids"):
            outcome.tokens += tokens
            outcome.times.append(now)
        outcome.finished |= choice.get("finish_reason") == "length"


def latencies(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Return the percentiles of time to first token and of the gaps between pieces, in milliseconds."""
    good = [outcome for outcome in outcomes if outcome.error is None and outcome.times]
    first = [outcome.times[0] for outcome in good]
    gaps = [gap for outcome in good for gap in np.diff(outcome.times)]
    return {"ttft_ms": _percentiles(first), "itl_ms": _percentiles(gaps)}


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.asarray(seconds), PERCENTILES) if len(seconds) else [float("nan")] * 3
    return {f"p{p}": round(float(value) * 1000, 3) for p, value in zip(PERCENTILES, values, strict=True)}
