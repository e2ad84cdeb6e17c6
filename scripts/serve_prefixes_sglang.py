# SPDX-License-Identifier: Apache-2.0
"""What serve_prefixes.py measures, on SGLang's server: requests that share long prompts.

    python scripts/serve_prefixes_sglang.py --json prefixes.json

Both shared prompts lie in the radix cache from the first round on, which is not measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from fi_backend import env
from fi_backend.benchmarks.serving.client import run_load
from fi_backend.benchmarks.serving.engines import ENGINES
from fi_backend.benchmarks.serving.protocols import SglangGenerate
from fi_backend.benchmarks.serving.server import ServerError, SglangServer
from models import dummy_llama
from recording import Record, circumstances, run_main
from serve_prefixes import WORKLOAD, add_workload, counts, parse, rounds_of, row_of, stop_at_problems

# Way of serving: the attention back end, and what it does without.
WAYS = {
    "shared": ("fi", ""),
    "flat": ("fi", env.SHARING),
    "unordered": ("fi", env.LPT),
    "triton": ("triton", ""),
    "fa3": ("fa3", ""),
}


def main() -> None:
    chosen = _arguments()
    workload = {name: getattr(chosen, name) for name in (*WORKLOAD, "shape", "page_size")}
    record = Record(circumstances("sglang") | {"workload": workload}, chosen.json)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        layers = dummy_llama.make(model, chosen.shape)
        for way in chosen.way or ["shared", "flat", "triton"]:
            try:
                row = _serve(chosen, way, model, layers, Path(folder), record)
            except ServerError as error:
                row = record.rows.get(way, {}) | {"problem": str(error)[-2000:]}
            record.keep(way, row)
            print(f"{way:<8} {json.dumps(row)}", flush=True)
    stop_at_problems(record.rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="of serving, repeated")
    add_workload(parser)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument(
        "--server", action="append", default=[], help="--server=ARGUMENT of sglang.launch_server, repeated"
    )
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--device", default="cuda", help="cpu, to try the script")
    return parse(parser)


def _serve(
    chosen: argparse.Namespace, way: str, model: Path, layers: int, folder: Path, record: Record
) -> dict[str, Any]:
    backend, without = WAYS[way]
    arguments = [
        *(f"--attention-backend={backend}", "--load-format=dummy", f"--device={chosen.device}"),
        *("--skip-tokenizer-init", "--dtype=bfloat16", f"--page-size={chosen.page_size}"),
        f"--context-length={chosen.common + chosen.group + chosen.own + chosen.answer + 16}",
        f"--max-running-requests={chosen.requests}",
        "--disable-cuda-graph" if chosen.eager else f"--cuda-graph-max-bs-decode={chosen.requests}",
        *("--sampling-backend=pytorch", "--grammar-backend=none", "--random-seed=0"),
        *chosen.server,
    ]
    stats, log = folder / way, (chosen.logs or folder) / f"{way}.log"
    variables = ENGINES["sglang"].cpu_variables if chosen.device == "cpu" else {}
    environment = env.child_environment(
        **{**variables, env.STATS_DIR.name: str(stats), env.WITHOUT.name: without}
    )
    started = time.perf_counter()
    with SglangServer(model, arguments, environment=environment, log=log) as server:
        ready = time.perf_counter() - started
        vocabulary = dummy_llama.SHAPES[chosen.shape]["vocab_size"]
        rounds = [
            run_load(server.url, SglangGenerate(), str(model), requests)
            for requests in rounds_of(chosen, vocabulary)
        ]
        record.keep(way, row_of(rounds, ready))  # stopping may take its time
    return {**row_of(rounds, ready), **counts(stats, layers, backend, without)}


if __name__ == "__main__":
    run_main(main)
