# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines, one after another in this process, and reports what they did.

usage: engine_run.py JOB.json RESULT.json

JOB: {"preload": [modules whose install() is called first],
      "keep_going": whether later runs follow one that failed,
      "seconds": after which no further run is begun, or null,
      "runs": [{"name": what to call it, "llm": arguments of vllm.LLM,
                "sabotage": null or a name of engine_patches.SABOTAGE,
                "environment": variables for this run, "sinks": whether every layer gets sinks,
                "batches": [{"prompts": [[token ids]], "max_tokens": n, "prompt_logprobs": bool,
                             "sampling": more of SamplingParams}]}]}
RESULT: a list of one object a run, see `_run`; {"error": traceback} of a run that failed, {"skipped": why} of
one that was not begun. It is written anew after each run, and a line is printed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_patches import RECORDS, SABOTAGE


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in job.get("preload", ()):
        importlib.import_module(name).install()
    started, results = time.perf_counter(), []
    for number, run in enumerate(job["runs"]):
        passed = time.perf_counter() - started
        if passed > (job.get("seconds") or float("inf")):
            result = {"skipped": f"not begun after {passed:.0f} s"}
        else:
            result = _run_or_error(run, keep_going=job.get("keep_going", False))
        results.append(result)
        # Whoever ends this process finds the runs that it made.
        written = Path(sys.argv[2]).with_suffix(".new")
        written.write_text(json.dumps(results))
        written.replace(sys.argv[2])
        print("engine_run:", run.get("name", number), _in_short(result), flush=True)


def _run_or_error(run: dict[str, Any], *, keep_going: bool) -> dict[str, Any]:
    with patch.dict(os.environ, run.get("environment", {})):
        _read_environment_anew()
        try:
            return _run(run)
        except Exception:
            if not keep_going:
                raise
            return {"error": traceback.format_exc()}


def _in_short(result: dict[str, Any]) -> str:
    if "error" in result:
        return "FAILED " + result["error"].strip().splitlines()[-1][:300]
    if "skipped" in result:
        return str(result["skipped"])
    counted = {name: count for name, count in (result["stats"] | result["metrics"]).items() if count}
    return json.dumps({**result["seconds"], "max_rss_mib": result["max_rss_mib"], **counted})


def _read_environment_anew() -> None:
    """Undo what a running engine does: vLLM keeps its variables as they were when it started."""
    from vllm import envs
    from vllm.v1.attention.backends import utils

    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()
    if hasattr(utils, "get_kv_cache_layout"):  # 0.26
        utils.get_kv_cache_layout.cache_clear()


def _run(run: dict[str, Any]) -> dict[str, Any]:
    """Return batches (tokens, logprobs, ..., cached), engine, stats, metrics, seconds, memory and records."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from fi_backend.core.counters import counters

    RECORDS.clear()
    before = asdict(counters().snapshot())
    started = time.perf_counter()
    with _sinks_in_every_layer() if run.get("sinks") else nullcontext():
        llm = LLM(
            **{
                "disable_log_stats": False,
                "enforce_eager": True,
                "skip_tokenizer_init": True,
                "seed": 0,
                **run["llm"],
            }
        )
    ready = time.perf_counter()
    with SABOTAGE[run.get("sabotage")]():
        batches = [_generate(llm, batch) for batch in run["batches"]]
    done = time.perf_counter()
    after = asdict(counters().snapshot())
    result = {
        "engine": after["engine"],
        "batches": batches,
        "stats": {
            name: after[name] - before[name] for name in after if name not in ("pid", "engine", "host")
        },
        "metrics": _metrics(llm),
        "seconds": {"start": round(ready - started, 2), "generate": round(done - ready, 2)},
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "records": list(RECORDS),
    }
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    _forget_graph_pool()
    cleanup_dist_env_and_memory()
    return result


def _forget_graph_pool() -> None:
    """Let the next engine of this process capture into a pool of its own.

    vLLM keeps one for good, which torch has dropped with the last graph of an engine that is gone.
    """
    from vllm.platforms import current_platform

    if hasattr(type(current_platform), "_global_graph_pool"):
        type(current_platform)._global_graph_pool = None


def _sinks_in_every_layer() -> AbstractContextManager[Any]:
    """Give attention sinks to the layers of a model that has none: few small models come with them."""
    import torch
    from vllm.model_executor.layers.attention import Attention

    original = Attention.__init__

    def with_sinks(self: Any, num_heads: int, *args: Any, **kwargs: Any) -> None:
        values = torch.linspace(1, 4, num_heads, dtype=torch.get_default_dtype())
        original(self, num_heads, *args, **{"sinks": torch.nn.Parameter(values), **kwargs})

    return patch.object(Attention, "__init__", with_sinks)


def _generate(llm: Any, batch: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    scored = bool(batch.get("prompt_logprobs"))
    sampling = SamplingParams(
        **{
            "temperature": 0.0,
            "max_tokens": batch["max_tokens"],
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 0 if scored else None,
            "prompt_logprobs": 0 if scored else None,
            **batch.get("sampling", {}),
        }
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    result: dict[str, Any] = {
        # Of each sample, those of one prompt together.
        "tokens": [list(sample.token_ids) for output in outputs for sample in output.outputs],
        "cached": [output.num_cached_tokens or 0 for output in outputs],
    }
    if scored:
        result["logprobs"] = [_chosen(o.outputs[0].logprobs, o.outputs[0].token_ids) for o in outputs]
        result["prompt_logprobs"] = [_chosen(o.prompt_logprobs[1:], o.prompt_token_ids[1:]) for o in outputs]
    return result


def _chosen(logprobs: Any, tokens: Any) -> list[float]:
    return [step[token].logprob for step, token in zip(logprobs, tokens, strict=True)]


def _metrics(llm: Any) -> dict[str, float]:
    """Return every counter that vLLM keeps, by its name without the prefix."""
    values = {}
    for metric in llm.get_metrics():
        if isinstance(value := getattr(metric, "value", None), (int, float)):
            values[metric.name.removeprefix("vllm:")] = value
    return values


if __name__ == "__main__":
    main()
