#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a known-answer model with real vLLM on the fi back end and checks a completion streamed over HTTP.

Exit status 0 only if the answer is right and the back end really computed it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from fi_backend import env
from fi_backend.benchmarks.models import copy_llama
from fi_backend.benchmarks.serving.known_answer import CUE, VLLM_ARGUMENTS, prompt_with_answer, verdict
from fi_backend.benchmarks.serving.server import Server, ServerError, VllmServer
from fi_backend.core.counters import read_stats, total


def main() -> int:
    """Run the demo and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="fi-demo-") as folder:
        root = Path(folder)
        model, stats_dir = root / "copy-llama", root / "stats"
        copy_llama.make(model)
        print(f"model: copy-llama, 2 layers, made in {model}", flush=True)
        server = VllmServer(
            model,
            ["--attention-backend", "fi", *VLLM_ARGUMENTS],
            environment=env.child_environment(HF_HUB_OFFLINE="1", FI_BACKEND_STATS_DIR=str(stats_dir)),
            log=root / "vllm.log",
            progress=Progress("vLLM"),
        )
        return ask(server, f"$ vllm {' '.join(server.command[1:])}", stats_dir, engine="vLLM")


def ask(server: Server, command: str, stats_dir: Path, *, engine: str) -> int:
    """Start a server, stream the answer, print all that happens and return the exit status."""
    print(command, flush=True)
    prompt, expected = prompt_with_answer()
    try:
        with server:
            print(
                f"prompt: {len(prompt)} bytes that end in {prompt[-30:]!r}\nanswer: {CUE}",
                end="",
                flush=True,
            )
            answer = ""
            for piece in server.stream(prompt, max_tokens=len(expected)):
                print(piece, end="", flush=True)
                answer += piece
    except ServerError as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    success, line = verdict(answer, expected, total(read_stats(stats_dir)), engine=engine)
    print(line if answer.endswith("\n") else f"\n{line}")
    if not success:
        print(server.log_tail(), file=sys.stderr)
    return 0 if success else 1


class Progress:
    """Prints how far the server is, every five seconds."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._next = 0.0

    def __call__(self, seconds: float, line: str) -> None:
        """Print the seconds passed and the last line of the log, if it is time to."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + 5
            print(f"  starting {self._engine}, {seconds:3.0f} s  {line.strip()[:90]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
