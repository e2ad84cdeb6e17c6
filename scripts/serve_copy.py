# SPDX-License-Identifier: Apache-2.0
"""copy-llama under load: whatever the server preempts and whoever hangs up, each finished answer is right.

    python scripts/serve_copy.py --speed 30
    python scripts/serve_copy.py --server=--tensor-parallel-size=2

Requests arrive as in the trace, many times as fast; the KV cache holds a part of them, so that the server
preempts; some clients hang up in the middle of the answer. One line of JSON says what happened. The exit
status is 0 only if every answer is right and every process of the server ran its layers on the back end; and
if the server has preempted and clients have hung up, unless --calm does without.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

import traces
from fi_backend import env
from fi_backend.benchmarks.serving.client import run_load
from fi_backend.benchmarks.serving.protocols import OpenAiCompletions, Outcome, Request
from fi_backend.benchmarks.serving.server import VllmServer
from fi_backend.core.counters import ProcessStats, read_stats, total
from latencies import lags
from models import copy_llama
from recording import run_main

HEAD_DIM = 128
KV_HEADS = 2
LAYERS = 2
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]}


def main() -> None:
    chosen = _arguments()
    questions = _questions(chosen)
    ranks = _ranks(chosen.server)
    with tempfile.TemporaryDirectory() as folder:
        model, stats = Path(folder) / "model", Path(folder) / "stats"
        copy_llama.make(model, head_dim=HEAD_DIM, kv_heads=KV_HEADS)
        graphs = ["--enforce-eager"] if chosen.eager else ["--compilation-config", json.dumps(GRAPHS)]
        arguments = [
            *(f"--attention-backend={chosen.backend}", "--skip-tokenizer-init", "--dtype", "bfloat16"),
            *("--max-model-len", str(2 * chosen.max_prompt), "--max-num-seqs", "64"),
            *("--max-num-batched-tokens", "2048"),
            *("--kv-cache-memory-bytes", str(chosen.pool_tokens * _bytes_a_token(ranks))),
            *graphs,
            *chosen.server,
        ]
        environment = env.child_environment(FI_BACKEND_STATS_DIR=str(stats))
        log = chosen.log or Path(folder) / "server.log"
        with VllmServer(model, arguments, environment=environment, log=log, start_timeout=400) as server:
            requests = [request for request, _ in questions]
            run = run_load(server.url, OpenAiCompletions(), str(model), requests)
            preemptions = server.metric("vllm:num_preemptions_total")
        # The process that serves HTTP and the engine's own core have no layers.
        workers = [each for each in read_stats(stats) if each.layers] if stats.is_dir() else []
    report = _judge(questions, run.outcomes) | lags([run])
    served = total(workers)
    report |= {
        "preemptions": preemptions,
        "ranks": ranks,
        "fi_ranks": len(workers),
        "fi_layers": served.layers,
    }
    if workers:
        report |= {name: getattr(served, name) for name in ("steps", "attention_calls", "replayed_calls")}
    print(json.dumps(report))
    if report["wrong"] or report["errors"]:
        sys.exit("expected right answers and no errors")
    if chosen.backend.upper() == "FI" and (len(workers) != ranks or not all(map(_ran_all, workers))):
        sys.exit(f"expected {LAYERS} layers on fi in each of {ranks} processes, called in every step")
    if not chosen.calm and not (preemptions and report["aborted"]):
        sys.exit(
            "expected preemptions (fewer --pool-tokens, a greater --speed) and clients that hang up "
            "(--aborts); --calm does without"
        )


def _ranks(server: list[str]) -> int:
    """Return how many processes share the heads of each layer, by the arguments of the server."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    ranks: int = parser.parse_known_args(server)[0].tensor_parallel_size
    return ranks


def _bytes_a_token(ranks: int) -> int:
    """Return the bytes of K and V, in bfloat16, of a token in one of `ranks` processes."""
    # Where there are more processes than KV heads, each has a copy of one.
    return 2 * max(1, KV_HEADS // ranks) * HEAD_DIM * 2 * LAYERS


def _ran_all(worker: ProcessStats) -> bool:
    calls = worker.attention_calls + worker.replayed_calls + worker.captured_calls
    return worker.layers == LAYERS and calls == LAYERS * worker.steps > 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="FI")
    parser.add_argument("--trace", type=Path, default=traces.AZURE_CONVERSATION)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the trace")
    parser.add_argument("--speed", type=float, default=30.0, help="divides the arrival times")
    parser.add_argument("--max-prompt", type=int, default=3000, help="tokens; longer prompts are cut")
    parser.add_argument("--pool-tokens", type=int, default=16384, help="tokens that the KV cache holds")
    parser.add_argument("--aborts", type=float, default=0.15, help="share of clients that hang up")
    parser.add_argument("--calm", action="store_true", help="demand neither preemptions nor aborts")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument(
        "--server", action="append", default=[], help="--server=ARGUMENT of vllm serve, repeated"
    )
    parser.add_argument("--log", type=Path, help="file for the server's log")
    return parser.parse_args()


def _questions(chosen: argparse.Namespace) -> list[tuple[Request, list[int]]]:
    """Return requests and their known answers, with the lengths and the times of the trace."""
    rng = random.Random(1)
    pairs = []
    for index, arrival in enumerate(traces.read(chosen.trace, seconds=chosen.seconds, speed=chosen.speed)):
        context = max(100, min(arrival.prompt, chosen.max_prompt))
        length = max(2, min(arrival.answer, context // 2))
        text = copy_llama.text_without_repeats(context, index)
        at = rng.randrange(context - length - 6)
        prompt, answer = copy_llama.question(text, at, length)
        hangs_up = rng.random() < chosen.aborts and length > 8
        abort_after = rng.randrange(1, length // 2) if hangs_up else None
        pairs.append((Request(prompt, length, arrival.at, abort_after=abort_after), answer))
    return pairs


def _judge(questions: list[tuple[Request, list[int]]], outcomes: list[Outcome]) -> dict[str, object]:
    wrong, errors, aborted = [], [], 0
    for index, ((request, answer), outcome) in enumerate(zip(questions, outcomes, strict=True)):
        if outcome.error:
            errors.append(outcome.error)
        elif request.abort_after is not None and not outcome.finished:
            aborted += 1
            if outcome.tokens != answer[: len(outcome.tokens)]:
                wrong.append(index)
        elif outcome.tokens != answer:
            wrong.append(index)
    return {
        "requests": len(questions),
        "wrong": len(wrong),
        "first_wrong": wrong[:5],
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "aborted": aborted,
    }


if __name__ == "__main__":
    run_main(main)
