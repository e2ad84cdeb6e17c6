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
from fi_backend.core.counters import ProcessStats, read_stats, total
from models import copy_llama
from serving import Server, ServerError, VllmServer

SENTENCE = "Six jolly wizards vexed pugnacious fbi men; zebras, quokkas and lynxes watch.\n"
CUE = "Six jolly"
ENGINE_ARGUMENTS = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "1024", "--block-size", "16", "--kv-cache-memory-bytes", "16777216"),
)


def prompt_with_answer() -> tuple[str, str]:
    """Return a long prompt that ends with the beginning of a sentence it holds, and the sentence's rest."""
    capitals = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    before, after = (
        copy_llama.text_without_repeats(1200, seed, alphabet=capitals).decode() for seed in (1, 2)
    )
    return f"{before}\n{SENTENCE}{after}\n{CUE}", SENTENCE[len(CUE) :]


def verdict(answer: str, expected: str, stats: ProcessStats, *, engine: str = "vLLM") -> tuple[bool, str]:
    """Return whether the run is a success, and the line that says so or why not."""
    if not stats.attention_calls:
        return False, f"back end fi served no attention call: {engine} fell back to another back end"
    served = (
        f"back end fi served {stats.attention_calls} attention calls "
        f"({stats.layers} layers x {stats.steps} steps)"
    )
    if stats.attention_calls != stats.layers * stats.steps:
        return False, f"{served}, expected {stats.layers * stats.steps}"
    if answer != expected:
        return False, f"{served}; answer wrong: expected {expected!r}, got {answer!r}"
    return True, f"{served}; answer correct"


def main() -> int:
    """Run the demo and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="fi-demo-") as folder:
        root = Path(folder)
        model, stats_dir = root / "copy-llama", root / "stats"
        copy_llama.make(model)
        print(f"model: copy-llama, 2 layers, made in {model}", flush=True)
        server = VllmServer(
            model,
            ["--attention-backend", "fi", *ENGINE_ARGUMENTS],
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
