# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM engines, one after another in this process, and reports what they did.

usage: engine_run.py JOB.json RESULT.json

JOB: {"preload": [modules whose install() is called first],
      "keep_going": whether later runs follow one that failed,
      "runs": [{"llm": arguments of vllm.LLM, "sabotage": null or a name of SABOTAGE,
                "environment": variables for this run, "sinks": whether every layer gets sinks,
                "batches": [{"prompts": [[token ids]], "max_tokens": n, "prompt_logprobs": bool,
                             "sampling": more of SamplingParams}]}]}
RESULT: a list of one object a run, see `_run`; {"error": traceback} of a run that failed.
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
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in job.get("preload", ()):
        importlib.import_module(name).install()
    results = []
    for run in job["runs"]:
        with patch.dict(os.environ, run.get("environment", {})):
            _read_environment_anew()
            try:
                results.append(_run(run))
            except Exception:
                if not job.get("keep_going"):
                    raise
                results.append({"error": traceback.format_exc()})
    Path(sys.argv[2]).write_text(json.dumps(results))


def _read_environment_anew() -> None:
    """Undo what a running engine does: vLLM keeps its variables as they were when it started."""
    from vllm import envs
    from vllm.v1.attention.backends import utils

    if hasattr(envs, "disable_envs_cache"):
        envs.disable_envs_cache()
    if hasattr(utils, "get_kv_cache_layout"):  # 0.26
        utils.get_kv_cache_layout.cache_clear()


def _run(run: dict[str, Any]) -> dict[str, Any]:
    """Return batches (tokens, logprobs, ..., cached), engine, stats, metrics, seconds and max_rss_mib."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from fi_backend.core.counters import counters

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
    }
    print(
        "engine_run:",
        json.dumps({k: result[k] for k in ("stats", "metrics", "seconds", "max_rss_mib")}),
        flush=True,
    )
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
        temperature=0.0,
        max_tokens=batch["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=0 if scored else None,
        prompt_logprobs=0 if scored else None,
        **batch.get("sampling", {}),
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    result: dict[str, Any] = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
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


def _ignore_last_page() -> AbstractContextManager[Any]:
    """Make every plan and run believe that the last page of each request is not there."""
    from fi_backend.core.page_table import PageTable

    original = PageTable.from_block_table

    def shortened(block_table: Any, kv_lens: Any, *, page_size: int) -> PageTable:
        return original(block_table, (kv_lens - page_size).clamp_min(0), page_size=page_size)

    return patch.object(PageTable, "from_block_table", shortened)


def _drop_appends() -> AbstractContextManager[Any]:
    """Write no keys and values of decoding steps into the cache."""
    from fi_backend.adapters.vllm import impl

    original = impl.append_kv

    def lossy(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **scales: Any) -> None:
        if slots.shape[0] > 64:
            original(key, value, k_cache, v_cache, slots, **scales)

    return patch.object(impl, "append_kv", lossy)


def _louder_queries() -> AbstractContextManager[Any]:
    """Make every softmax scale two percent too large."""
    from fi_backend.core.attention import BatchAttention

    original = BatchAttention.run

    def louder(self: BatchAttention, q: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, q * 1.02, *args, **kwargs)

    return patch.object(BatchAttention, "run", louder)


def _shorten_items() -> AbstractContextManager[Any]:
    """Let the native kernels run plans in which every query tile lacks the last 16 keys."""
    from fi_backend.core.attention import BatchAttention
    from fi_backend.core.plan import WORK_ITEM

    original = BatchAttention.plan

    def damaged(self: BatchAttention, *args: Any, **kwargs: Any) -> Any:
        plan = original(self, *args, **kwargs)
        start = plan.layout.items
        items = self._plan_buffer.tensor.numpy()[start : start + plan.items.nbytes].view(WORK_ITEM)
        last: dict[tuple[int, int], int] = {}
        for item in items:
            tile = int(item["request"]), int(item["q_begin"])
            last[tile] = max(last.get(tile, 0), int(item["kv_end"]))
        for item in items:
            seen = last[int(item["request"]), int(item["q_begin"])] - 16
            item["kv_end"] = max(item["kv_begin"], min(item["kv_end"], seen))
            item["flags"] &= 1  # the last chunk would find the true end again
        return plan

    return patch.object(BatchAttention, "plan", damaged)


def _no_sync() -> AbstractContextManager[Any]:
    """Raise RuntimeError where a step would make the host wait for the GPU."""
    import torch

    from fi_backend.adapters.vllm.impl import FiAttentionImpl
    from fi_backend.adapters.vllm.metadata import FiMetadataBuilder

    def strict(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return call

    stack = ExitStack()
    for owner, name in (
        (FiMetadataBuilder, "build"),
        (FiMetadataBuilder, "build_for_drafting"),
        (FiAttentionImpl, "forward"),
        (FiAttentionImpl, "do_kv_cache_update"),
    ):
        stack.enter_context(patch.object(owner, name, strict(getattr(owner, name))))
    return stack


def _check_faults() -> AbstractContextManager[Any]:
    """Raise ValueError before the next step when kernels met lengths or pages that cannot be."""
    from fi_backend.core.attention import BatchAttention

    original = BatchAttention.plan

    def checked(self: BatchAttention, *args: Any, **kwargs: Any) -> Any:
        self._plan_buffer.raise_faults(self.planner.layout)
        return original(self, *args, **kwargs)

    return patch.object(BatchAttention, "plan", checked)


SABOTAGE: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "ignore_last_page": _ignore_last_page,
    "drop_appends": _drop_appends,
    "louder_queries": _louder_queries,
    "shorten_items": _shorten_items,
    # No sabotage, but stricter than a server.
    "no_sync": _no_sync,
    "check_faults": _check_faults,
}

if __name__ == "__main__":
    main()
