# SPDX-License-Identifier: Apache-2.0
"""A layer and its metadata without an engine: memory that is counted, plans, scales, sinks, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

from fi_backend.adapters.vllm import impl, workspace
from fi_backend.adapters.vllm.metadata import FiMetadataBuilder
from fi_backend.core import append, jit, kernels, planner
from fi_backend.core.counters import counters
from fi_backend.errors import UnsupportedError

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 12


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stand-in for vLLM's configuration while a model is built."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=128),
        cache_config=SimpleNamespace(block_size=BLOCK),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )
    monkeypatch.setattr(impl, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float32)
    return config


def _layer(config: Any, name: str, *, head_size_v: int = HEAD_DIM, **options: Any) -> Any:
    """Build a layer as vLLM's model code does, and put it where vLLM keeps it."""
    layer = SimpleNamespace(
        impl=impl.FiAttentionImpl(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **options),
        head_size_v=head_size_v,
        _k_scale=torch.tensor(1.0),
        _v_scale=torch.tensor(1.0),
    )
    config.compilation_config.static_forward_context[name] = layer
    return layer


def _builder(config: Any, names: list[str]) -> FiMetadataBuilder:
    return FiMetadataBuilder(SimpleNamespace(block_size=BLOCK), names, config, torch.device("cpu"))


def _common(query_lens: list[int], kv_lens: list[int], **fields: Any) -> CommonAttentionMetadata:
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


def _step(config: Any, layer: Any, common: CommonAttentionMetadata, cache: torch.Tensor) -> torch.Tensor:
    """Run a step of a one-layer model on random queries, keys and values."""
    generator = torch.Generator().manual_seed(int(common.num_actual_tokens))
    tokens = common.num_actual_tokens + 3  # vLLM may pad
    q, k, v = (torch.randn(tokens, h, HEAD_DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS))
    metadata = _builder(config, ["layer"]).build(0, common)
    layer.impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
    return layer.impl.forward(layer, q, k, v, cache, metadata, torch.full_like(q, math.nan))


def _cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM, dtype=dtype)


def test_building_a_layer_allocates_the_scratch_memory_and_loads_the_kernels(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen before vLLM measures the memory left for the KV cache."""
    monkeypatch.setattr(workspace, "_pool", {})
    for loaded_once in (append._native, kernels._native, planner.module, workspace._prepare):
        loaded_once.cache_clear()
    layer = _layer(config, "layer")
    (scratch,) = workspace._pool.values()
    assert scratch.numel() > 0
    monkeypatch.setattr(jit, "load", lambda spec: pytest.fail(f"{spec.name} is loaded only now"))
    _step(config, layer, _common([3, 1], [20, 40]), _cache())
    (after,) = workspace._pool.values()
    assert after is scratch, "serving allocated scratch memory"


def test_layers_of_one_kind_share_a_plan(config: Any) -> None:
    for index in range(4):
        _layer(config, f"layer{index}", sliding_window=None if index % 2 else 8)
    builder = _builder(config, [f"layer{index}" for index in range(4)])
    assert sorted(spec.window_left for spec, _ in builder.attention) == [-1, 7]
    before = counters().snapshot()
    builder.build(0, _common([1], [5]))
    after = counters().snapshot()
    assert (after.steps - before.steps, after.plans - before.plans) == (1, 2)


def test_layers_that_differ_in_the_size_of_v_alone(config: Any) -> None:
    """vLLM tells the size of V to the layer and not to its impl, whose spec is the same."""
    random = torch.Generator().manual_seed(3)
    common = _common([3, 1], [20, 40])
    layers = [_layer(config, f"v{size}", head_size_v=size) for size in (HEAD_DIM, 8)]
    metadata = _builder(config, ["v32", "v8"]).build(0, common)
    q, k, v = (torch.randn(4, heads, HEAD_DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS))
    history = torch.randn(_cache().shape, generator=random)
    outputs = []
    for layer in layers:
        size = layer.head_size_v
        cache = history[..., : HEAD_DIM + size].contiguous()
        layer.impl.do_kv_cache_update(layer, k, v[..., :size].contiguous(), cache, common.slot_mapping)
        out = torch.full((4, HEADS, size), math.nan)
        outputs.append(layer.impl.forward(layer, q, k, v, cache, metadata, out))
    wide, narrow = outputs
    assert not wide.isnan().any()
    torch.testing.assert_close(narrow, wide[..., :8])


def test_a_step_is_counted_once_for_all_groups(config: Any) -> None:
    for name in ("full", "windowed"):
        _layer(config, name, sliding_window=8 if name == "windowed" else None)
    groups = [_builder(config, ["windowed"]), _builder(config, ["full"])]
    before = counters().snapshot()
    for group in groups:
        group.build(0, _common([1], [5]))
    assert counters().snapshot().steps - before.steps == 1


def test_lengths_that_shrink_after_planning_are_read_anew(config: Any) -> None:
    """With asynchronous scheduling a step is planned with upper bounds; the layers see the exact lengths."""
    layer = _layer(config, "layer", sliding_window=9)
    cache = torch.randn(_cache().shape, generator=torch.Generator().manual_seed(1))
    q = torch.randn(3, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    outputs = []
    for planned in ([20, 33], [31, 60]):
        common = _common([2, 1], planned)
        metadata = _builder(config, ["layer"]).build(0, common)
        common.seq_lens.copy_(torch.tensor([20, 33]))
        outputs.append(layer.impl.forward(layer, q, q, q, cache, metadata, torch.full_like(q, math.nan)))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not outputs[0].isnan().any()


def test_padding_rows_are_left_alone(config: Any) -> None:
    out = _step(config, _layer(config, "layer"), _common([2, 1], [20, 33]), _cache())
    assert out[3:].isnan().all()
    assert not out[:3].isnan().any()


def test_profiling_without_metadata_gives_zeros(config: Any) -> None:
    layer = _layer(config, "layer")
    q = torch.randn(5, HEADS, HEAD_DIM)
    out = layer.impl.forward(layer, q, q, q, torch.tensor([]), None, torch.full_like(q, math.nan))
    assert torch.equal(out, torch.zeros_like(q))
    layer.impl.do_kv_cache_update(layer, q, q, torch.tensor([]), torch.zeros(5, dtype=torch.int64))


def test_sinks_that_are_loaded_later_count(config: Any) -> None:
    """vLLM builds a layer with an empty parameter and fills it afterwards."""
    sinks = torch.nn.Parameter(torch.full((HEADS,), -math.inf, dtype=torch.bfloat16), requires_grad=False)
    layer = _layer(config, "layer", sinks=sinks)
    common = _common([2, 1], [20, 33])
    without = _step(config, layer, common, _cache())
    sinks.fill_(4.0)
    assert (_step(config, layer, common, _cache())[:3].abs() < without[:3].abs()).float().mean() > 0.99


def test_fp8_bytes_and_scales(config: Any) -> None:
    """vLLM hands an fp8 cache over as bytes, and scales in tensors that may change between steps."""
    common = _common([2, 1], [20, 33])
    exact = _step(config, _layer(config, "layer"), common, _cache())[:3]
    layer = _layer(config, "layer", kv_cache_dtype="fp8")
    caches = []
    for k_scale, v_scale in ((1.0, 1.0), (0.02, 0.03), ([0.02, 1.0], [1.0, 0.03])):
        layer._k_scale = torch.tensor(k_scale)
        layer._v_scale = torch.tensor(v_scale)
        caches.append(_cache(torch.uint8))
        torch.testing.assert_close(_step(config, layer, common, caches[-1])[:3], exact, atol=0.1, rtol=0.1)
    one, small, by_head = caches
    assert not torch.equal(one, small), "the scales had no effect on what was written"
    k, v = slice(0, HEAD_DIM), slice(HEAD_DIM, None)
    assert torch.equal(by_head[:, 0, :, k], small[:, 0, :, k])
    assert torch.equal(by_head[:, 1, :, k], one[:, 1, :, k])
    assert torch.equal(by_head[:, 1, :, v], small[:, 1, :, v])


def test_the_batch_invariant_mode_follows_vllms_switch(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _layer(config, "layer").impl.spec.batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert _layer(config, "layer").impl.spec.batch_invariant


def test_refused_layers(config: Any) -> None:
    with pytest.raises(UnsupportedError, match="decoder attention; got encoder_only"):
        _layer(config, "layer", attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(UnsupportedError, match="chunk_lookback=1"):
        _layer(config, "layer", chunk_lookback=1)


def test_refused_steps(config: Any) -> None:
    layer = _layer(config, "layer")
    with pytest.raises(UnsupportedError, match="causal"):
        _builder(config, ["layer"]).build(0, _common([1], [5], causal=torch.tensor([True])))
    q = torch.randn(5, HEADS, HEAD_DIM)
    with pytest.raises(UnsupportedError, match="output_scale"):
        layer.impl.forward(layer, q, q, q, _cache(), None, q, output_scale=torch.ones(1))
