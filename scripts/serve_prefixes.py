# SPDX-License-Identifier: Apache-2.0
"""Serves requests that share long prompts, with and without parts of fi, and records the latencies.

    python scripts/serve_prefixes.py --json prefixes.json

Each round sends all requests at once: behind one prompt of all, a prompt of the request's group and tokens of
its own. Both prompts lie in vLLM's prefix cache from the first round on, which is not measured. The model has
the shape of Llama-3.1-8B and random weights. `itl_ms` counts the gaps while all requests decode.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from fi_backend import env
from fi_backend.benchmarks.serving.client import LoadRun, run_load
from fi_backend.benchmarks.serving.protocols import OpenAiCompletions, Request
from fi_backend.benchmarks.serving.server import ServerError, VllmServer
from fi_backend.core.counters import read_stats, total
from latencies import lags, percentiles
from models import dummy_llama
from recording import Record, circumstances, run_main
from serve_trace import GRAPHS

# Way of serving: the attention back end, and what it does without.
WAYS = {
    "shared": ("FI", ""),
    "flat": ("FI", env.SHARING),
    "unordered": ("FI", env.LPT),
    "host-plan": ("FI", env.DEVICE_PLAN),
    "FLASH_ATTN": ("FLASH_ATTN", ""),
    "TRITON_ATTN": ("TRITON_ATTN", ""),
    "FLASHINFER": ("FLASHINFER", ""),
}
_COUNTS = ("layers", "steps", "plans", "attention_calls", "replayed_calls", "captured_calls")
_SHARED = ("shared_plans", "prefix_nodes", "kv_tokens_saved", "kv_bytes_saved")


def main() -> None:
    chosen = _arguments()
    workload = {name: getattr(chosen, name) for name in WORKLOAD} | {"shape": chosen.shape}
    record = Record(circumstances() | {"workload": workload}, chosen.json)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        layers = dummy_llama.make(model, chosen.shape)
        for way in chosen.way or ["shared", "flat", "FLASH_ATTN"]:
            try:
                row = _serve(chosen, way, model, layers, Path(folder), record)
            except ServerError as error:
                row = record.rows.get(way, {}) | {"problem": str(error)[-2000:]}
            record.keep(way, row)
            print(f"{way:<12} {json.dumps(row)}", flush=True)
    stop_at_problems(record.rows)


WORKLOAD = {
    "requests": (64, "sent at once"),
    "groups": (8, "of the requests"),
    "common": (4096, "tokens of the prompt of all"),
    "group": (1024, "tokens of a group's prompt"),
    "own": (256, "tokens of a request's own"),
    "answer": (128, "tokens generated for each request"),
    "rounds": (3, "of all requests; the first is not measured"),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="of serving, repeated")
    add_workload(parser)
    parser.add_argument(
        "--server", action="append", default=[], help="--server=ARGUMENT of vllm serve, repeated"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    return parse(parser)


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add what all engines are given alike."""
    for name, (default, meaning) in WORKLOAD.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} ({default})")
    parser.add_argument("--shape", choices=list(dummy_llama.SHAPES), default="8b")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--json", type=Path, help="file to write the record to")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments; stops where nothing would be measured."""
    chosen = parser.parse_args()
    if chosen.rounds < 2:
        parser.error(
            f"--rounds: expected at least 2, of which the first is not measured; got {chosen.rounds}"
        )
    return chosen


def row_of(rounds: list[LoadRun], ready: float) -> dict[str, Any]:
    """Return the figures of one way of serving. ready: seconds until the engine took requests."""
    errors = [outcome.error for run in rounds for outcome in run.outcomes if outcome.error]
    measured = rounds[1:]
    firsts = [outcome.first for run in measured for outcome in run.outcomes if outcome.first is not None]
    return {
        "itl_ms": percentiles([1000 * gap for run in measured for gap in gaps_of_all(run)]),
        "ttft_ms": percentiles([1000 * first for first in firsts]),
        **lags(measured),
        "round_s": [round(run.seconds, 2) for run in rounds],
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "ready_s": round(ready, 1),
    }


def _serve(
    chosen: argparse.Namespace, way: str, model: Path, layers: int, folder: Path, record: Record
) -> dict[str, Any]:
    backend, without = WAYS[way]
    length = chosen.common + chosen.group + chosen.own + chosen.answer
    graphs = ["--enforce-eager"] if chosen.eager else ["--compilation-config", json.dumps(GRAPHS)]
    arguments = [
        *(f"--attention-backend={backend}", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--max-model-len", str(length + 16), "--max-num-seqs", str(chosen.requests)),
        *("--dtype", "bfloat16", "--enable-prefix-caching"),
        *graphs,
        *chosen.server,
    ]
    stats, log = folder / way, (chosen.logs or folder) / f"{way}.log"
    started = time.perf_counter()
    environment = env.child_environment(FI_BACKEND_STATS_DIR=str(stats), FI_BACKEND_WITHOUT=without)
    with VllmServer(model, arguments, environment=environment, log=log, start_timeout=400) as server:
        ready = time.perf_counter() - started
        rounds = [
            run_load(server.url, OpenAiCompletions(), str(model), requests)
            for requests in rounds_of(chosen, dummy_llama.SHAPES[chosen.shape]["vocab_size"])
        ]
        record.keep(way, row_of(rounds, ready))  # stopping may take its time
        preemptions = server.metric("vllm:num_preemptions_total")
    return {**row_of(rounds, ready), "preemptions": preemptions, **counts(stats, layers, backend, without)}


def counts(stats: Path, layers: int, backend: str, without: str) -> dict[str, Any]:
    """Return {"fi": what fi counted} where it was to serve, and {"problem": ...} where it counted otherwise.

    layers: of the model; a process of tensor parallelism has all of them. without: what was left out.
    """
    served = total(read_stats(stats) if stats.is_dir() else [])
    asked = backend.lower() == "fi"
    if asked != (served.layers > 0) or served.layers % layers:
        return {"problem": f"{served.layers} layers ran on fi, which was {'' if asked else 'not '}asked for"}
    if not asked:
        return {}
    row: dict[str, Any] = {"fi": {name: getattr(served, name) for name in (*_COUNTS, *_SHARED)}}
    if (served.shared_plans > 0) != (without != env.SHARING):
        row["problem"] = f"{served.shared_plans} shared plans without {without or 'nothing'}"
    return row


def stop_at_problems(rows: dict[str, dict[str, Any]]) -> None:
    """End the program with the problems of all ways of serving, once all of them have been measured."""
    found = [f"{way}: {row['problem']}" for way, row in rows.items() if "problem" in row]
    found += [f"{way}: {row['errors']} requests failed" for way, row in rows.items() if row.get("errors")]
    if found:
        sys.exit("; ".join(found))


def rounds_of(chosen: argparse.Namespace, vocabulary: int) -> list[list[Request]]:
    """Return the requests of each round of a workload."""
    rng = random.Random(0)
    # The last ids of the vocabulary are special.
    ids = range(vocabulary - 300)
    common = rng.choices(ids, k=chosen.common)
    groups = [rng.choices(ids, k=chosen.group) for _ in range(chosen.groups)]
    return [
        [
            Request([*common, *groups[i % chosen.groups], *rng.choices(ids, k=chosen.own)], chosen.answer)
            for i in range(chosen.requests)
        ]
        for _ in range(chosen.rounds)
    ]


def gaps_of_all(run: LoadRun) -> list[float]:
    """Gaps between tokens that came after all requests had one and before any was complete, in seconds."""
    good = [outcome.times[0] for outcome in run.outcomes if outcome.error is None and outcome.times[0]]
    begin, end = max((t[0] for t in good), default=0.0), min((t[-1] for t in good), default=0.0)
    return [b - a for times in good for a, b in pairwise(times) if begin <= a and b <= end]


if __name__ == "__main__":
    run_main(main)
