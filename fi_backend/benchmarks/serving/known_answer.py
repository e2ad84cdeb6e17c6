# SPDX-License-Identifier: Apache-2.0
"""One request whose answer is known: it is right only if every KV page was written and read as it should."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fi_backend import env
from fi_backend.benchmarks.models import copy_llama
from fi_backend.benchmarks.serving.server import Server, ServerError, SglangServer, VllmServer
from fi_backend.core.counters import ProcessStats, read_stats, total

SENTENCE: Final = "Six jolly wizards vexed pugnacious fbi men; zebras, quokkas and lynxes watch.\n"
CUE: Final = "Six jolly"
VLLM_ARGUMENTS: Final = (
    *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "4"),
    *("--max-num-batched-tokens", "1024", "--block-size", "16", "--kv-cache-memory-bytes", "16777216"),
)
SGLANG_ARGUMENTS: Final = (
    *("--dtype", "bfloat16", "--page-size", "16", "--context-length", "4096", "--max-running-requests", "4"),
    *("--max-total-tokens", "16384", "--chunked-prefill-size", "1024", "--disable-cuda-graph"),
    *("--mem-fraction-static", "0.3", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--skip-server-warmup",
)
SGLANG_CPU_VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRITON_INTERPRET": "1",  # its allocator of pages is a Triton kernel
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Served:
    """Whether an engine served the request on fi, and the line that says so or why not.

    ready_s: until the engine was ready, None if it never was. answer_s: from request to the last token.
    """

    engine: str
    ok: bool
    detail: str
    ready_s: float | None = None
    answer_s: float | None = None


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


def serve_known_answer(
    engine: str,
    *,
    cpu: bool,
    arguments: Sequence[str] = (),
    progress: Callable[[float, str], None] = lambda _seconds, _line: None,
    start_timeout: float = 600.0,
) -> Served:
    """Start `engine`, vllm or sglang, with copy-llama on fi and check one streamed answer.

    arguments: of the server, after ours. progress: seconds passed and the last line of the log.
    """
    with tempfile.TemporaryDirectory(prefix="fi-known-answer-") as folder:
        root = Path(folder)
        copy_llama.make(root / "copy-llama")
        settings: dict[str, Any] = {"log": root / "log.txt", "progress": progress}
        settings["start_timeout"] = start_timeout
        variables = {"HF_HUB_OFFLINE": "1", env.STATS_DIR.name: str(root / "stats")}
        chosen = ["--attention-backend", "fi"]
        server: Server
        if engine == "vllm":
            settings["environment"] = env.child_environment(**variables)
            server = VllmServer(root / "copy-llama", [*chosen, *VLLM_ARGUMENTS, *arguments], **settings)
        else:
            chosen += ["--device", "cpu"] if cpu else []
            variables |= SGLANG_CPU_VARIABLES if cpu else {}
            settings["environment"] = env.child_environment(**variables)
            server = SglangServer(root / "copy-llama", [*chosen, *SGLANG_ARGUMENTS, *arguments], **settings)
        return _ask(engine, server, root / "stats")


def _ask(engine: str, server: Server, stats: Path) -> Served:
    prompt, expected = prompt_with_answer()
    began = time.perf_counter()
    ready = None
    try:
        with server:
            ready = time.perf_counter() - began
            answer = "".join(server.stream(prompt, max_tokens=len(expected)))
            took = time.perf_counter() - began - ready
    except ServerError as error:
        return Served(engine, False, str(error), None if ready is None else round(ready, 2))
    counted = total(read_stats(stats) if stats.is_dir() else [])
    ok, line = verdict(answer, expected, counted, engine=engine)
    return Served(engine, ok, line, round(ready, 2), round(took, 3))
