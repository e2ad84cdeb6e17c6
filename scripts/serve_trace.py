# SPDX-License-Identifier: Apache-2.0
"""Replays a serving trace against `vllm serve` on several attention back ends and records the latencies.

    python scripts/serve_trace.py --backend FI --backend FLASH_ATTN --json serving.json

The model has the shape of Llama-3.1-8B and random weights, the prompts are random tokens, and every answer
has the length that the trace says, so that all back ends serve the same load.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import traces
from fi_backend import env
from fi_backend.benchmarks.serving.client import run_load
from fi_backend.benchmarks.serving.protocols import OpenAiCompletions, Request
from fi_backend.benchmarks.serving.server import VllmServer
from fi_backend.core.counters import read_stats, total
from latencies import latencies
from models import dummy_llama
from recording import circumstances, run_main

# Without torch.compile a server is ready in seconds; FULL needs no compiled graph pieces.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}


def main() -> None:
    chosen = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        layers = dummy_llama.make(model, chosen.shape)
        rows = {}
        for backend in chosen.backend or ["FI", "FLASH_ATTN"]:
            rows[backend] = _serve(chosen, backend, model, layers, Path(folder))
            print(f"{backend:<12} {json.dumps(rows[backend])}", flush=True)
    record = {
        **circumstances(),
        "trace": chosen.trace.name,
        "seconds": chosen.seconds,
        "speed": chosen.speed,
        "rows": rows,
    }
    if chosen.json:
        chosen.json.write_text(json.dumps(record, indent=2) + "\n")
    if any(row["errors"] for row in rows.values()):
        sys.exit("some requests failed")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", help="attention back end, repeated")
    parser.add_argument("--trace", type=Path, default=traces.AZURE_CONVERSATION)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="divides the arrival times")
    parser.add_argument("--shape", choices=list(dummy_llama.SHAPES), default="8b")
    parser.add_argument("--max-len", type=int, default=8192, help="longer requests are cut")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--server", action="append", default=[], help="--server=ARGUMENT of vllm serve, repeated"
    )
    parser.add_argument("--json", type=Path, help="file to write the record to")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    return parser.parse_args()


def _serve(
    chosen: argparse.Namespace, backend: str, model: Path, layers: int, folder: Path
) -> dict[str, Any]:
    graphs = ["--enforce-eager"] if chosen.eager else ["--compilation-config", json.dumps(GRAPHS)]
    arguments = [
        *(f"--attention-backend={backend}", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--max-model-len", str(chosen.max_len), "--max-num-seqs", "256", "--dtype", "bfloat16"),
        *graphs,
        *chosen.server,
    ]
    stats = folder / backend
    log = (chosen.logs or folder) / f"{backend}.log"
    requests = _requests(chosen, dummy_llama.SHAPES[chosen.shape]["vocab_size"])
    started = time.perf_counter()
    environment = env.child_environment(FI_BACKEND_STATS_DIR=str(stats))
    with VllmServer(model, arguments, environment=environment, log=log, start_timeout=400) as server:
        ready = time.perf_counter() - started
        warm = run_load(server.url, OpenAiCompletions(), str(model), [Request([7] * 500, 8)] * 4)
        run = run_load(server.url, OpenAiCompletions(), str(model), requests)
        preemptions = server.metric("vllm:num_preemptions_total")
    errors = [outcome.error for outcome in (*warm.outcomes, *run.outcomes) if outcome.error]
    served = total(read_stats(stats)) if stats.is_dir() else None
    row = {
        **latencies(run),
        "requests": len(requests),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "output_tokens_per_s": round(sum(outcome.count for outcome in run.outcomes) / run.seconds, 1),
        "took_s": round(run.seconds, 1),
        "ready_s": round(ready, 1),
        "preemptions": preemptions,
    }
    ours = served is not None and served.layers > 0
    if ours:
        row["fi"] = {
            name: getattr(served, name)
            for name in ("layers", "steps", "attention_calls", "replayed_calls", "captured_calls")
        }
    if (backend.upper() == "FI") != ours or (ours and served.layers % layers):
        raise SystemExit(f"{backend}: another back end served the layers; fi counted {served}")
    return row


def _requests(chosen: argparse.Namespace, vocabulary: int) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for arrival in traces.read(chosen.trace, seconds=chosen.seconds, speed=chosen.speed):
        answer = max(1, min(arrival.answer, chosen.max_len // 2))
        length = max(1, min(arrival.prompt, chosen.max_len - answer))
        # The last ids of the vocabulary are special.
        prompt = rng.choices(range(vocabulary - 300), k=length)
        requests.append(Request(prompt, answer, arrival.at))
    return requests


if __name__ == "__main__":
    run_main(main)
