# SPDX-License-Identifier: Apache-2.0
"""Serves requests that share long prompts, with and without shared reading, and records the latencies.

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

import numpy as np

from fi_backend import env
from fi_backend.core.counters import read_stats, total
from load import PERCENTILES, Outcome, Request, send
from models import dummy_llama
from recording import circumstances
from serve_trace import GRAPHS
from serving import ServerError, VllmServer

# Way of serving: the attention back end, and the switch of shared reading.
WAYS = {
    "shared": ("FI", "1"),
    "flat": ("FI", "0"),
    "FLASH_ATTN": ("FLASH_ATTN", "1"),
    "TRITON_ATTN": ("TRITON_ATTN", "1"),
    "FLASHINFER": ("FLASHINFER", "1"),
}
_COUNTS = ("layers", "steps", "plans", "attention_calls", "replayed_calls", "captured_calls")
_SHARED = ("shared_plans", "prefix_nodes", "kv_tokens_saved", "kv_bytes_saved")


def main() -> None:
    chosen = _arguments()
    record = circumstances()
    record["workload"] = {name: getattr(chosen, name) for name in WORKLOAD} | {"shape": chosen.shape}
    record["rows"] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        layers = dummy_llama.make(model, chosen.shape)
        for way in chosen.way or ["shared", "flat", "FLASH_ATTN"]:
            try:
                row = _serve(chosen, way, model, layers, Path(folder))
            except ServerError as error:
                row = {"problem": str(error)[-2000:]}
            record["rows"][way] = row
            print(f"{way:<12} {json.dumps(row)}", flush=True)
            if chosen.json:  # after each, should a later one be ended
                chosen.json.write_text(json.dumps(record, indent=2) + "\n")
    stop_at_problems(record["rows"])


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


def row_of(rounds: list[list[Outcome]], ready: float) -> dict[str, Any]:
    """Return the figures of one way of serving. ready: seconds until the engine took requests."""
    errors = [outcome.error for outcomes in rounds for outcome in outcomes if outcome.error]
    measured = rounds[1:]
    return {
        "itl_ms": percentiles([gap for outcomes in measured for gap in gaps_of_all(outcomes)]),
        "ttft_ms": percentiles([o.times[0] for outcomes in measured for o in outcomes if o.times]),
        "round_s": [round(max((o.times[-1] for o in one if o.times), default=0), 2) for one in rounds],
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "ready_s": round(ready, 1),
    }


def _serve(chosen: argparse.Namespace, way: str, model: Path, layers: int, folder: Path) -> dict[str, Any]:
    backend, share = WAYS[way]
    length = chosen.common + chosen.group + chosen.own + chosen.answer
    graphs = ["--enforce-eager"] if chosen.eager else ["--compilation-config", json.dumps(GRAPHS)]
    arguments = [
        *("--attention-backend", backend, "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--max-model-len", str(length + 16), "--max-num-seqs", str(chosen.requests)),
        *("--dtype", "bfloat16", "--enable-prefix-caching"),
        *graphs,
        *chosen.server,
    ]
    stats, log = folder / way, (chosen.logs or folder) / f"{way}.log"
    started = time.perf_counter()
    environment = env.child_environment(FI_BACKEND_STATS_DIR=str(stats), FI_BACKEND_SHARE_PREFIXES=share)
    with VllmServer(model, arguments, environment=environment, log=log, start_timeout=400) as server:
        ready = time.perf_counter() - started
        rounds = [
            send(server.url, str(model), requests)
            for requests in rounds_of(chosen, dummy_llama.SHAPES[chosen.shape]["vocab_size"])
        ]
        preemptions = server.metric("vllm:num_preemptions_total")
    return {**row_of(rounds, ready), "preemptions": preemptions, **counts(stats, layers, backend, share)}


def counts(stats: Path, layers: int, backend: str, share: str) -> dict[str, Any]:
    """Return {"fi": what fi counted} where it was to serve, and {"problem": ...} where it counted otherwise.

    layers: of the model; a process of tensor parallelism has all of them. share: "1" where prefixes are to be
    read together.
    """
    served = total(read_stats(stats) if stats.is_dir() else [])
    asked = backend.lower() == "fi"
    if asked != (served.layers > 0) or served.layers % layers:
        return {"problem": f"{served.layers} layers ran on fi, which was {'' if asked else 'not '}asked for"}
    if not asked:
        return {}
    row: dict[str, Any] = {"fi": {name: getattr(served, name) for name in (*_COUNTS, *_SHARED)}}
    if (served.shared_plans > 0) != (share == "1"):
        row["problem"] = f"{served.shared_plans} shared plans with sharing {'on' if share == '1' else 'off'}"
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


def gaps_of_all(outcomes: list[Outcome]) -> list[float]:
    """Gaps between tokens that came after all requests had one and before any was complete, in seconds."""
    good = [outcome.times for outcome in outcomes if outcome.error is None and outcome.times]
    begin, end = max((t[0] for t in good), default=0.0), min((t[-1] for t in good), default=0.0)
    return [b - a for times in good for a, b in pairwise(times) if begin <= a and b <= end]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return PERCENTILES of some times, in milliseconds, and how many they are."""
    if not seconds:
        return {"count": 0}
    values = np.percentile(np.asarray(seconds), PERCENTILES)
    return {f"p{p}": round(float(v) * 1000, 3) for p, v in zip(PERCENTILES, values, strict=True)} | {
        "count": len(seconds)
    }


if __name__ == "__main__":
    main()
