# SPDX-License-Identifier: Apache-2.0
"""Layers, metadata and caches as vLLM makes them, without an engine."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from fi_backend.adapters.vllm import impl
from fi_backend.adapters.vllm.metadata import FiMetadataBuilder

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 12


def stand_in_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for vLLM's configuration while a model is built, and make it the current one."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=128),
        cache_config=SimpleNamespace(block_size=BLOCK, enable_prefix_caching=True),
        device_config=SimpleNamespace(device=torch.device("cpu"), device_type="cpu"),
        parallel_config=SimpleNamespace(use_ubatching=False),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float32)
    return config


def roomy_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same for steps of up to 16 requests with contexts that are worth sharing."""
    config = stand_in_config(monkeypatch)
    config.scheduler_config.max_num_seqs = 16
    config.model_config.max_model_len = 4096
    return config


def make_layer(config: Any, name: str, *, head_size_v: int = HEAD_DIM, **options: Any) -> Any:
    """Build a layer as vLLM's model code does, and put it where vLLM keeps it."""
    layer = SimpleNamespace(
        impl=impl.FiAttentionImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **options),
        head_size_v=head_size_v,
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
    )
    config.compilation_config.static_forward_context[name] = layer
    return layer


def make_builder(config: Any, names: list[str]) -> FiMetadataBuilder:
    return FiMetadataBuilder(SimpleNamespace(block_size=BLOCK), names, config, torch.device("cpu"))


def make_common(query_lens: list[int], kv_lens: list[int], **fields: Any) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.arange(1, 1 + 4 * len(kv_lens), dtype=torch.int32).view(len(kv_lens), 4)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    rows = torch.repeat_interleave(torch.arange(len(kv_lens)), torch.tensor(query_lens))
    position = torch.cat([torch.arange(k - q, k) for q, k in zip(query_lens, kv_lens, strict=True)])
    slots = table[rows, position // BLOCK].long() * BLOCK + position % BLOCK
    defaults = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": lens,
        "seq_lens_cpu_upper_bound": lens,
        "num_reqs": len(kv_lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": max(query_lens),
        "max_seq_len": max(kv_lens),
        "block_table_tensor": table,
        "slot_mapping": slots,
    }
    return CommonAttentionMetadata(**{**defaults, **fields})


def shared_step(requests: int = 12, pages: int = 120, *, q_len: int = 1, max_seq_len: int = 0) -> Any:
    """Requests behind one text of `pages` blocks, each with two of its own."""
    kv_lens = [pages * BLOCK + 5 + r for r in range(requests)]
    common = make_common([q_len] * requests, [4 * BLOCK] * requests)
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    common.seq_lens = common.seq_lens_cpu_upper_bound = lens
    common.max_seq_len = max_seq_len or max(kv_lens)
    table = torch.full((requests, pages + 4), -7, dtype=torch.int32)
    table[:, :pages] = torch.arange(1, pages + 1)
    own = torch.arange(2 * requests, dtype=torch.int32).reshape(requests, 2)
    table[:, pages : pages + 2] = pages + 1 + own
    common.block_table_tensor = table
    return common


def run_step(config: Any, layer: Any, common: CommonAttentionMetadata, cache: torch.Tensor) -> torch.Tensor:
    """Run a step of a one-layer model on random queries, keys and values."""
    generator = torch.Generator().manual_seed(int(common.num_actual_tokens))
    tokens = common.num_actual_tokens + 3  # vLLM may pad
    q, k, v = (torch.randn(tokens, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    metadata = make_builder(config, ["layer"]).build(0, common)
    layer.impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
    return layer.impl.forward(layer, q, k, v, cache, metadata, torch.full_like(q, math.nan))


def make_cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype)


def outputs(config: Any, layer: Any, common: Any) -> torch.Tensor:
    """Attention of a step over random caches; blocks that no row names are NaN."""
    generator = torch.Generator().manual_seed(3)
    table = common.block_table_tensor
    cache = make_cache().new_full((int(table.max()) + 2, *make_cache().shape[1:]), float("nan"))
    named = table[table > 0].unique().long()
    cache[named] = torch.randn(len(named), *cache.shape[1:], generator=generator)
    q = torch.randn(common.num_actual_tokens, HEADS, 32, generator=generator)
    built = make_builder(config, ["layer"]).build(0, common)
    return layer.impl.forward(layer, q, q, q, cache, built, torch.full_like(q, float("nan")))
