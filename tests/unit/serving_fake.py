# SPDX-License-Identifier: Apache-2.0
"""A server in a thread that answers like vLLM or SGLang, one request at a time at a given speed."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from aiohttp import web

from fi_backend import env
from fi_backend.benchmarks.serving.server import ServerError


class FakeServer:
    """Stands in for a Server.

    first: seconds of work before the first token of a request, for which requests queue; gap: between
    tokens. fails: HTTP status of every answer instead. cut: tokens after which streams break off.
    layers: attention layers that its counters claim for fi, 0 for none. crowd: requests that must have come
    before the first is answered. read: grows by every event that the client has read; where it is given, the
    server sends on only when all that it has sent is read.
    """

    first, gap = 0.002, 0.001
    fails: int | None = None
    cut: int | None = None
    starts = True
    layers = 2
    crowd = 1
    read: list[Any] | None = None
    bodies: list[dict[str, Any]]

    def __init__(
        self, model: str, arguments: list[str], *, environment: dict[str, str], log: Path, **_: Any
    ) -> None:
        self.command = ["fake", "serve", model, *arguments]
        self._stats = Path(environment[env.STATS_DIR.name])
        self._backend = next(each for each in arguments if each.startswith("--attention-backend="))
        self.environment, self.url = environment, ""
        self.bodies = type(self).bodies = []
        log.write_text("log\n")

    def __enter__(self) -> FakeServer:
        if not self.starts:
            raise ServerError("vllm serve ended with status 1 before it was ready")
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(120)
        if self.layers and self._backend.endswith("=fi"):
            self._count()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(120)

    def _count(self) -> None:
        from fi_backend.core.counters import CALLS, LAYERS, STEPS, Counters

        counters = Counters(self._stats)
        for index, amount in ((LAYERS, self.layers), (STEPS, 5), (CALLS, 5 * self.layers)):
            counters.add(index, amount)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._over, self._turn = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        self._crowded, self._sent = asyncio.Event(), 0
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count = body["max_tokens"]

        def event(sample: int, index: int) -> dict[str, Any]:
            reason = "length" if index == count - 1 else None
            return {
                "choices": [{"index": sample, "token_ids": [100 * sample + index], "finish_reason": reason}]
            }

        return await self._stream(request, body, count, body.get("n", 1), event)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count, samples = body["sampling_params"]["max_new_tokens"], body["sampling_params"].get("n", 1)

        def event(sample: int, index: int) -> dict[str, Any]:
            reason = {"type": "length"} if index == count - 1 else None
            about = {"completion_tokens": index + 1, "finish_reason": reason}
            ids = [100 * sample + each for each in range(index + 1)]
            return {"index": sample, "output_ids": ids, "meta_info": about}

        return await self._stream(request, body, count, samples, event)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], count: int, samples: int, event: Any
    ) -> web.StreamResponse:
        self.bodies.append(body)
        if self.fails:
            return web.Response(status=self.fails, text="overloaded")
        if len(self.bodies) >= self.crowd:
            self._crowded.set()
        await self._crowded.wait()
        async with self._turn:
            await asyncio.sleep(self.first)
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(count):
            if index == self.cut:
                return response
            for sample in range(samples):
                self._sent += 1
                await response.write(f"data: {json.dumps(event(sample, index))}\n\n".encode())
            while self.read is not None and len(self.read) < self._sent:
                await asyncio.sleep(self.gap)
            await asyncio.sleep(self.gap)
        await response.write(b"data: [DONE]\n\n")
        return response
