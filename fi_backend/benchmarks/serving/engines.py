# SPDX-License-Identifier: Apache-2.0
"""Which server is started for a back end, and what it is told."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fi_backend import env
from fi_backend.benchmarks.serving.protocols import OpenAiCompletions, Protocol, SglangGenerate
from fi_backend.benchmarks.serving.server import Server, SglangServer, VllmServer

_LONGEST = 100


@dataclass(frozen=True)
class Backend:
    """One way of serving: the name that the engine knows, and environment variables of its own.

    text: as the user wrote it, NAME or NAME+VARIABLE=VALUE+...
    """

    text: str
    name: str
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """Whether fi_backend is to serve."""
        return self.name.lower() == "fi"


def parse_backend(text: str) -> Backend:
    """Return the way of serving that `text` describes; ValueError for one that is no NAME+VARIABLE=VALUE."""
    name, *settings = text.split("+")
    pairs = [setting.partition("=") for setting in settings]
    if not name or not all(variable and equals for variable, equals, _ in pairs):
        raise ValueError(f"backend: expected NAME or NAME+VARIABLE=VALUE; got {text!r}.")
    return Backend(text, name, {variable: value for variable, _, value in pairs})


@dataclass(frozen=True)
class EngineKind:
    """An engine as a server. name: of its package; length: its option for the longest request."""

    name: str
    server: Callable[..., Server]
    protocol: Protocol
    length: str
    cpu: tuple[str, ...]
    cpu_variables: dict[str, str]
    dummy: tuple[str, ...]


ENGINES = {
    "vllm": EngineKind(
        "vllm",
        VllmServer,
        OpenAiCompletions(),
        "--max-model-len",
        # Compiling takes longer than a small model serves; 1 GiB of KV cache.
        cpu=("--enforce-eager", "--kv-cache-memory-bytes=1073741824", "--dtype=bfloat16"),
        cpu_variables={"OMP_WAIT_POLICY": "passive"},
        dummy=("--load-format=dummy", "--skip-tokenizer-init"),
    ),
    "sglang": EngineKind(
        "sglang",
        SglangServer,
        SglangGenerate(),
        "--context-length",
        cpu=(
            *("--device=cpu", "--disable-cuda-graph", "--dtype=bfloat16", "--mem-fraction-static=0.3"),
            *("--max-total-tokens=65536", "--sampling-backend=pytorch", "--grammar-backend=none"),
        ),
        cpu_variables={
            "SGLANG_USE_CPU_ENGINE": "1",
            "TRITON_INTERPRET": "1",  # its allocator of pages is a Triton kernel
            "OMP_WAIT_POLICY": "passive",
        },
        dummy=("--load-format=dummy", "--skip-tokenizer-init"),
    ),
}


def server_arguments(
    kind: EngineKind, backend: Backend, *, max_len: int, cpu: bool, dummy: bool, extra: Sequence[str]
) -> list[str]:
    """Return the arguments after the model; the user's `extra` ones replace ours of the same name."""
    ours = [f"--attention-backend={backend.name}", f"{kind.length}={max_len}"]
    ours += kind.cpu if cpu else ()
    ours += kind.dummy if dummy else ()
    given = {argument.partition("=")[0] for argument in extra if argument.startswith("--")}
    return [*(argument for argument in ours if argument.partition("=")[0] not in given), *extra]


def make_server(
    kind: EngineKind,
    backend: Backend,
    model: str,
    arguments: Sequence[str],
    *,
    cpu: bool,
    stats: Path,
    log: Path,
    **settings: Any,
) -> Server:
    """Return the server, not started yet; `stats` becomes the folder of our counters."""
    inherited = env.child_environment()
    defaults = {name: value for name, value in kind.cpu_variables.items() if cpu and name not in inherited}
    environment = env.child_environment(
        **{**defaults, **backend.variables, env.STATS_DIR.name: str(stats.absolute())}
    )
    return kind.server(model, arguments, environment=environment, log=log, **settings)


def file_name(text: str) -> str:
    """Return a name for files of `text`, without what such names should not have, of at most 100 letters."""
    name = re.sub(r"[^\w.=-]+", "_", text)
    if len(name) <= _LONGEST:
        return name
    return f"{name[: _LONGEST - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
