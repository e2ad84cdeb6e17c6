# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM's or SGLang's server, waits until it is ready, streams completions over HTTP and stops it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# The proxy of the environment, which urlopen() takes, does not know the servers of this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start or died; the text holds the end of its log."""


class Server:
    """A server process with an OpenAI-compatible interface, as a context manager.

    name: of the server in errors; command: to start it, without the address; model: what to name in
    requests; environment: of the process; log: file for its output; progress: called about every other
    second with the seconds passed and the last line of the log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        model: Path | str,
        *,
        environment: dict[str, str],
        log: Path,
        progress: Callable[[float, str], None] = lambda _seconds, _line: None,
        start_timeout: float = 900.0,
    ) -> None:
        self.port = _free_port()
        self.log = log
        self._name = name
        self._model = model
        self._progress = progress
        self._timeout = start_timeout
        self._environment = environment
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port)]

    def __enter__(self) -> Server:
        """Start the server and wait until it answers; raises ServerError otherwise."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            # A group of its own, so that the engine's processes can be ended with it.
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stream(self, prompt: str, *, max_tokens: int) -> Iterator[str]:
        """Yield the greedy completion of `prompt`, piece by piece as the server sends it."""
        body = {
            "model": str(self._model),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _DIRECT.open(request, timeout=600) as response:
                for line in response:
                    event = line.decode().strip().removeprefix("data: ")
                    if event == "[DONE]":
                        return
                    if event:
                        yield json.loads(event)["choices"][0]["text"]
        except (urllib.error.URLError, TimeoutError) as error:
            raise ServerError(f"the completion failed: {error}{self._why()}") from error

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"http://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        """Return the sum of the server's counter or gauge `name`, as Prometheus would read it."""
        with _DIRECT.open(f"{self.url}/metrics", timeout=60) as response:
            text = response.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        if not values:
            raise ServerError(f"the server has no metric {name}")
        return sum(map(float, values))

    def stop(self) -> int:
        """Stop the server and every process it started; return its exit status."""
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(30)
        finally:  # also where waiting is interrupted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_ready(self) -> None:
        started = time.monotonic()
        while (passed := time.monotonic() - started) < self._timeout:
            if (status := self._process.poll()) is not None:
                raise ServerError(f"{self._name} ended with status {status} before it was ready{self._why()}")
            try:
                with _DIRECT.open(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                self._progress(passed, self.log_tail(1))
                time.sleep(0.5)
        raise ServerError(f"{self._name} was not ready after {self._timeout:.0f} s{self._why()}")

    def _why(self) -> str:
        """The first error in the log, which the last lines seldom show, and the last lines."""
        errors = re.findall(
            r"^(?!.* WARNING ).*\b\w+Error: .*$", self.log.read_text(errors="replace"), re.MULTILINE
        )
        return f"\nfirst error: {errors[0] if errors else 'none'}\nend of the log:\n{self.log_tail()}"


class VllmServer(Server):
    """A `vllm serve` process of this Python environment.

    model: folder; arguments: more of the command line; settings: as for a Server.
    """

    def __init__(self, model: Path | str, arguments: Sequence[str], **settings: Any) -> None:
        script = Path(sys.executable).with_name("vllm")
        program = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
        super().__init__("vllm serve", [*program, "serve", str(model), *arguments], model, **settings)


class SglangServer(Server):
    """A `python -m sglang.launch_server` process of this Python environment.

    model: folder; arguments: more of the command line; settings: as for a Server.
    """

    def __init__(self, model: Path | str, arguments: Sequence[str], **settings: Any) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *arguments]
        super().__init__("sglang.launch_server", command, model, **settings)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
