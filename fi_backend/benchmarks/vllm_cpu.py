# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention operator for CPUs as a benchmark peer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.errors import UnsupportedError

_BLOCK_MULTIPLE = 32


class VllmCpu(Peer):
    """`cpu_attention_with_kv_cache`, the operator behind vLLM's CPU_ATTN, with its own cache layout."""

    name = "vllm-cpu"

    def unavailable(self) -> str | None:
        """Return what is missing, or None."""
        if importlib.util.find_spec("vllm") is None:
            return "vllm is not installed"
        try:
            _operators()
        except (ImportError, AttributeError) as error:
            return f"this vllm has no CPU attention operator ({error})"
        return None

    def prepare(self, problem: Problem) -> Run:
        """Copy the caches into vLLM's layout and schedule the step."""
        ops, choose_isa, split_kv = _operators()
        spec = problem.spec
        if spec.page_size % _BLOCK_MULTIPLE:
            raise UnsupportedError(
                f"page_size: vLLM's operator takes multiples of {_BLOCK_MULTIPLE}; got {spec.page_size}."
            )
        isa = choose_isa(problem.q.dtype, spec.page_size, spec.head_dim, "auto")
        layers = [_pack(ops, isa, key, value) for key, value in problem.layers]
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=problem.kv_lens.shape[0],
            num_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            seq_lens=problem.kv_lens,
            dtype=problem.q.dtype,
            query_start_loc=problem.qo_indptr,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=split_kv,
        )
        out = torch.full_like(problem.q, float("nan"))

        def run(layer: int) -> torch.Tensor:
            key, value = layers[layer]
            ops.cpu_attention_with_kv_cache(
                query=problem.q,
                key_cache=key,
                value_cache=value,
                output=out,
                query_start_loc=problem.qo_indptr,
                seq_lens=problem.kv_lens,
                scale=spec.scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=problem.block_table,
                softcap=0,
                scheduler_metadata=metadata,
                s_aux=None,
            )
            return out

        return run


def _operators() -> tuple[Any, Any, bool]:
    from vllm import _custom_ops, envs
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        raise AttributeError("torch.ops._C.cpu_attention_with_kv_cache is absent")
    return _custom_ops, _get_attn_isa, envs.VLLM_CPU_ATTN_SPLIT_KV


def _pack(ops: Any, isa: str, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write caches of [pages, page, heads, dim], as an engine would, into [pages, heads, 2 * page, dim]."""
    pages, page, heads, dim = key.shape
    key_cache, value_cache = torch.zeros(pages, heads, 2 * page, dim, dtype=key.dtype).chunk(2, dim=2)
    slots = torch.arange(pages * page, dtype=torch.int64)
    ops.cpu_attn_reshape_and_cache(
        key.reshape(-1, heads, dim), value.reshape(-1, heads, dim), key_cache, value_cache, slots, isa
    )
    return key_cache, value_cache


def fi_backend_benchmark_peers(device: str) -> Sequence[Peer]:
    """Offer the operator on CPUs."""
    return [VllmCpu()] if device == "cpu" else []
