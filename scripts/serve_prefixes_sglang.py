# SPDX-License-Identifier: Apache-2.0
"""What serve_prefixes.py measures, in SGLang's own engine: requests that share long prompts.

    python scripts/serve_prefixes_sglang.py --json prefixes.json

Each way of serving is one `sglang.Engine`, whose answers are streamed to this process. Both shared prompts
lie in the radix cache from the first round on, which is not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from fi_backend import env
from load import Outcome, Request
from models import dummy_llama
from recording import circumstances
from serve_prefixes import WORKLOAD, add_workload, counts, parse, rounds_of, row_of, stop_at_problems

# Way of serving: the attention back end, and the switch of shared reading.
WAYS = {"shared": ("fi", "1"), "flat": ("fi", "0"), "triton": ("triton", "1"), "fa3": ("fa3", "1")}


def main() -> None:
    chosen = _arguments()
    record = circumstances("sglang")
    record["workload"] = {name: getattr(chosen, name) for name in WORKLOAD} | {
        name: getattr(chosen, name) for name in ("shape", "page_size")
    }
    record["rows"] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        layers = dummy_llama.make(model, chosen.shape)
        for way in chosen.way or ["shared", "flat", "triton"]:
            row = _serve(chosen, way, model, layers, Path(folder) / way)
            record["rows"][way] = row
            print(f"{way:<8} {json.dumps(row)}", flush=True)
            if chosen.json:  # after each, should a later one be ended
                chosen.json.write_text(json.dumps(record, indent=2) + "\n")
    stop_at_problems(record["rows"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--way", action="append", choices=list(WAYS), help="of serving, repeated")
    add_workload(parser)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device", default="cuda", help="cpu, to try the script")
    return parse(parser)


def _serve(chosen: argparse.Namespace, way: str, model: Path, layers: int, stats: Path) -> dict[str, Any]:
    import sglang

    backend, share = WAYS[way]
    os.environ.update({env.STATS_DIR.name: str(stats), env.SHARE_PREFIXES.name: share})
    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(model),
        attention_backend=backend,
        load_format="dummy",
        device=chosen.device,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        page_size=chosen.page_size,
        context_length=chosen.common + chosen.group + chosen.own + chosen.answer + 16,
        max_running_requests=chosen.requests,
        cuda_graph_max_bs_decode=chosen.requests,
        disable_cuda_graph=chosen.eager,
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=0,
    )
    try:
        ready = time.perf_counter() - started
        loop = asyncio.get_event_loop_policy().get_event_loop()
        vocabulary = dummy_llama.SHAPES[chosen.shape]["vocab_size"]
        rounds = [
            loop.run_until_complete(_round(engine, requests)) for requests in rounds_of(chosen, vocabulary)
        ]
    finally:
        engine.shutdown()
    return {**row_of(rounds, ready), **counts(stats, layers, backend, share)}


async def _round(engine: Any, requests: list[Request]) -> list[Outcome]:
    start = time.perf_counter()
    return list(await asyncio.gather(*(_one(engine, request, start) for request in requests)))


async def _one(engine: Any, request: Request, start: float) -> Outcome:
    outcome = Outcome()
    sampling = {"temperature": 0, "max_new_tokens": request.max_tokens, "ignore_eos": True}
    try:
        stream = await engine.async_generate(input_ids=request.prompt, sampling_params=sampling, stream=True)
        async for piece in stream:
            outcome.tokens = piece["output_ids"]
            outcome.times.append(time.perf_counter() - start)
        outcome.finished = True
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


if __name__ == "__main__":
    main()
