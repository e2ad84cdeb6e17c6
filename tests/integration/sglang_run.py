# SPDX-License-Identifier: Apache-2.0
"""Runs SGLang engines, one after another, and reports what they answered.

usage: sglang_run.py JOB.json RESULT.json

JOB: [{"engine": arguments of sglang.Engine, "environment": variables for this run,
       "batches": [{"prompts": [[token ids]], "max_tokens": n}]}]
RESULT: a list of {"batches": [{"tokens": ..., "cached": ...}]}, one a run.

The attention runs in a process of its own, which finds plug-ins by itself and ends this one when it fails.
"""

from __future__ import annotations

import json
import os
import sys
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

    engine = sglang.Engine(
        skip_tokenizer_init=True,
        device="cpu",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        random_seed=0,
        mem_fraction_static=0.3,
        **run["engine"],
    )
    try:
        return {"batches": [_generate(engine, batch) for batch in run["batches"]]}
    finally:
        engine.shutdown()


def _generate(engine: Any, batch: dict[str, Any]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": batch["max_tokens"], "ignore_eos": True}
    outputs = engine.generate(input_ids=batch["prompts"], sampling_params=sampling)
    return {
        "tokens": [output["output_ids"] for output in outputs],
        "cached": [output["meta_info"]["cached_tokens"] for output in outputs],
    }


if __name__ == "__main__":
    main()
