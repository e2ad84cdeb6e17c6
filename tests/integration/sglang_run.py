# SPDX-License-Identifier: Apache-2.0
"""Runs SGLang engines, one after another, and reports what they answered.

usage: sglang_run.py JOB.json RESULT.json

JOB: [{"engine": arguments of sglang.Engine, "environment": variables for this run,
       "batches": [{"prompts": [[token ids]], "max_tokens": n, "logprobs": bool}]}]
RESULT: a list of {"batches": [{"tokens", "cached", "retractions", "verifications", "logprobs"}],
"seconds": {"start", "generate"}}, one a run.

The attention runs in a process of its own, which finds plug-ins by itself and ends this one when it fails.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    results = []
    for run in job:
        with patch.dict(os.environ, run["environment"]):
            results.append(_run(run))
        Path(sys.argv[2]).write_text(json.dumps(results))


def _run(run: dict[str, Any]) -> dict[str, Any]:
    import sglang

    started = time.perf_counter()
    engine = sglang.Engine(
        **{
            "skip_tokenizer_init": True,
            "device": "cpu",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "random_seed": 0,
            "mem_fraction_static": 0.3,
            **run["engine"],
        }
    )
    ready = time.perf_counter()
    try:
        batches = [_generate(engine, batch) for batch in run["batches"]]
        done = time.perf_counter()
        seconds = {"start": round(ready - started, 1), "generate": round(done - ready, 1)}
        return {"batches": batches, "seconds": seconds}
    finally:
        engine.shutdown()


def _generate(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": batch["max_tokens"], "ignore_eos": True}
    scored = bool(batch.get("logprobs"))
    outputs = engine.generate(input_ids=batch["prompts"], sampling_params=sampling, return_logprob=scored)
    facts = [output["meta_info"] for output in outputs]
    logprobs = [[float(x[0]) for x in each["output_token_logprobs"]] for each in facts] if scored else []
    return {
        "tokens": [output["output_ids"] for output in outputs],
        "cached": [each["cached_tokens"] for each in facts],
        "retractions": [each.get("num_retractions", 0) for each in facts],
        "verifications": [each.get("spec_verify_ct", 0) for each in facts],
        "logprobs": logprobs,
    }


if __name__ == "__main__":
    main()
