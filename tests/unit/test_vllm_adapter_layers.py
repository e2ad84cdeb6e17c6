# SPDX-License-Identifier: Apache-2.0
"""A layer and its metadata without an engine: memory that is counted, plans, scales, sinks, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.attention.backend import AttentionType
from vllm_step import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    make_builder,
    make_cache,
    make_common,
    make_layer,
    run_step,
    stand_in_config,
)

from fi_backend.adapters import workspace
from fi_backend.core import jit, kernels, ops_module, planner
from fi_backend.core.counters import counters
from fi_backend.errors import UnsupportedError


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in_config(monkeypatch)


def test_building_a_layer_allocates_the_scratch_memory_and_loads_the_kernels(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both happen before vLLM measures the memory left for the KV cache."""
    monkeypatch.setattr(workspace, "_pool", {})
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(kernels, "_ready", set())
    for loaded_once in (ops_module._loaded, planner.module, workspace._prepare):
        loaded_once.cache_clear()
    layer = make_layer(config, "layer")
    (scratch,) = workspace._pool.values()
    assert scratch.numel() > 0
    monkeypatch.setattr(jit, "load", lambda spec: pytest.fail(f"{spec.name} is loaded only now"))
    run_step(config, layer, make_common([3, 1], [20, 40]), make_cache())
    (after,) = workspace._pool.values()
    assert after is scratch, "serving allocated scratch memory"


def test_a_layer_is_built_where_tensors_go_elsewhere(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM builds models under a default device, which is not where plans are made."""
    monkeypatch.setattr(workspace, "_pool", {})
    workspace._prepare.cache_clear()
    with torch.device("meta"):
        layer = make_layer(config, "layer", alibi_slopes=[0.5] * HEADS)
        make_builder(config, ["layer"])
    assert layer.impl.alibi_slopes.device.type == "cpu"
    assert all(memory.device.type == "cpu" for memory in workspace._pool.values())


def test_sleep_mode_is_refused(config: Any) -> None:
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedError, match=r"enable_sleep_mode: .* Leave sleep mode off"):
        make_layer(config, "layer")


def test_layers_of_one_kind_share_a_plan(config: Any) -> None:
    for index in range(4):
        make_layer(config, f"layer{index}", sliding_window=None if index % 2 else 8)
    builder = make_builder(config, [f"layer{index}" for index in range(4)])
    assert sorted(kind.spec.window_left for kind in builder.attention) == [-1, 7]
    before = counters().snapshot()
    builder.build(0, make_common([1], [5]))
    after = counters().snapshot()
    assert (after.steps - before.steps, after.plans - before.plans) == (1, 2)


def test_layers_that_differ_in_the_size_of_v_alone(config: Any) -> None:
    """vLLM tells the size of V to the layer and not to its impl, whose spec is the same."""
    random = torch.Generator().manual_seed(3)
    common = make_common([3, 1], [20, 40])
    layers = [make_layer(config, f"v{size}", head_size_v=size) for size in (HEAD_DIM, 8)]
    metadata = make_builder(config, ["v32", "v8"]).build(0, common)
    q, k, v = (torch.randn(4, heads, HEAD_DIM, generator=random) for heads in (HEADS, KV_HEADS, KV_HEADS))
    history = torch.randn(make_cache().shape, generator=random)
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
        make_layer(config, name, sliding_window=8 if name == "windowed" else None)
    groups = [make_builder(config, ["windowed"]), make_builder(config, ["full"])]
    before = counters().snapshot()
    for group in groups:
        group.build(0, make_common([1], [5]))
    assert counters().snapshot().steps - before.steps == 1


def test_lengths_that_shrink_after_planning_are_read_anew(config: Any) -> None:
    """With asynchronous scheduling a step is planned with upper bounds; the layers see the exact lengths."""
    layer = make_layer(config, "layer", sliding_window=9)
    cache = torch.randn(make_cache().shape, generator=torch.Generator().manual_seed(1))
    q = torch.randn(3, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    outputs = []
    for planned in ([20, 33], [31, 60]):
        common = make_common([2, 1], planned)
        metadata = make_builder(config, ["layer"]).build(0, common)
        common.seq_lens.copy_(torch.tensor([20, 33]))
        outputs.append(layer.impl.forward(layer, q, q, q, cache, metadata, torch.full_like(q, math.nan)))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert not outputs[0].isnan().any()


def test_padding_rows_are_left_alone(config: Any) -> None:
    out = run_step(config, make_layer(config, "layer"), make_common([2, 1], [20, 33]), make_cache())
    assert out[3:].isnan().all()
    assert not out[:3].isnan().any()


def test_profiling_without_metadata_gives_zeros(config: Any) -> None:
    layer = make_layer(config, "layer")
    q = torch.randn(5, HEADS, HEAD_DIM)
    out = layer.impl.forward(layer, q, q, q, torch.tensor([]), None, torch.full_like(q, math.nan))
    assert torch.equal(out, torch.zeros_like(q))
    layer.impl.do_kv_cache_update(layer, q, q, torch.tensor([]), torch.zeros(5, dtype=torch.int64))


def test_sinks_that_are_loaded_later_count(config: Any) -> None:
    """vLLM builds a layer with an empty parameter and fills it afterwards."""
    sinks = torch.nn.Parameter(torch.full((HEADS,), -math.inf, dtype=torch.bfloat16), requires_grad=False)
    layer = make_layer(config, "layer", sinks=sinks)
    common = make_common([2, 1], [20, 33])
    without = run_step(config, layer, common, make_cache())
    sinks.fill_(4.0)
    assert (run_step(config, layer, common, make_cache())[:3].abs() < without[:3].abs()).float().mean() > 0.99


def test_fp8_bytes_and_scales(config: Any) -> None:
    """vLLM hands an fp8 cache over as bytes, and scales in tensors that may change between steps."""
    common = make_common([2, 1], [20, 33])
    exact = run_step(config, make_layer(config, "layer"), common, make_cache())[:3]
    layer = make_layer(config, "layer", kv_cache_dtype="fp8")
    caches = []
    for k_scale, v_scale in ((1.0, 1.0), (0.02, 0.03), ([0.02, 1.0], [1.0, 0.03])):
        layer._k_scale = torch.tensor(k_scale)
        layer._v_scale = torch.tensor(v_scale)
        caches.append(make_cache(torch.uint8))
        torch.testing.assert_close(run_step(config, layer, common, caches[-1])[:3], exact, atol=0.1, rtol=0.1)
    one, small, by_head = caches
    assert not torch.equal(one, small), "the scales had no effect on what was written"
    k, v = slice(0, HEAD_DIM), slice(HEAD_DIM, None)
    assert torch.equal(by_head[:, 0, :, k], small[:, 0, :, k])
    assert torch.equal(by_head[:, 1, :, k], one[:, 1, :, k])
    assert torch.equal(by_head[:, 1, :, v], small[:, 1, :, v])


def test_the_batch_invariant_mode_follows_vllms_switch(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not make_layer(config, "layer").impl.spec.batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert make_layer(config, "layer").impl.spec.batch_invariant


def test_refused_layers(config: Any) -> None:
    with pytest.raises(UnsupportedError, match="decoder attention; got encoder_only"):
        make_layer(config, "layer", attn_type=AttentionType.ENCODER_ONLY)
    with pytest.raises(UnsupportedError, match="chunk_lookback=1"):
        make_layer(config, "layer", chunk_lookback=1)


def test_refused_steps(config: Any) -> None:
    layer = make_layer(config, "layer")
    with pytest.raises(UnsupportedError, match="causal"):
        make_builder(config, ["layer"]).build(0, make_common([1], [5], causal=torch.tensor([True])))
    q = torch.randn(5, HEADS, HEAD_DIM)
    with pytest.raises(UnsupportedError, match="output_scale"):
        layer.impl.forward(layer, q, q, q, make_cache(), None, q, output_scale=torch.ones(1))
