# SPDX-License-Identifier: Apache-2.0
"""Variants under vLLM without an engine: asked for by name or decided by layer, compared with the oracle."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from layer_plugins import decide, shipped_plugins
from numeric import assert_close
from oracle import attention
from vllm_step import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    make_builder,
    make_cache,
    make_common,
    make_layer,
    stand_in_config,
)

from fi_backend import AttentionVariant, UnsupportedError
from fi_backend.adapters.vllm import translate
from fi_backend.adapters.vllm.impl import FiAttentionImpl
from fi_backend.core.counters import counters
from fi_backend.hooks import LayerVariant, Plugins
from fi_backend.variants import ALIBI, OUTPUT_SCALE

SCALE = HEAD_DIM**-0.5
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
ASKED = {"variant": "alibi", "variant_args": {"slopes": SLOPES.tolist()}}
Q_LENS, KV_LENS = (1, 20), (40, 33)


def scaled(factor: float) -> LayerVariant:
    """Outputs times a factor: nothing in it tells rows apart."""
    return LayerVariant(OUTPUT_SCALE, {"scale": torch.full((HEADS,), factor)})


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return shipped_plugins(monkeypatch)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, plugins: Plugins) -> Any:
    return stand_in_config(monkeypatch)


class Step:
    """Random requests over a cache, and what one layer makes of them."""

    def __init__(self) -> None:
        self.common = make_common(list(Q_LENS), list(KV_LENS))
        random = torch.Generator().manual_seed(5)
        size = make_cache().shape
        self.k, self.v = (torch.randn(*size[:3], HEAD_DIM, generator=random) for _ in "kv")
        self.cache = torch.cat((self.k, self.v), -1)
        self.q = torch.randn(sum(Q_LENS), HEADS, HEAD_DIM, generator=random)

    def run(self, layer: Any, metadata: Any) -> torch.Tensor:
        out = torch.full_like(self.q, math.nan)
        return layer.impl.forward(layer, self.q, self.q, self.q, self.cache, metadata, out)

    def check(self, out: torch.Tensor, **rule: Any) -> None:
        """Compare with the oracle; rule: its soft_cap, slopes, window_left, v_scale."""
        first = 0
        for request, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
            blocks = self.common.block_table_tensor[request].long()
            k, v = (
                cache[blocks].transpose(1, 2).reshape(-1, KV_HEADS, HEAD_DIM)[:kv_len]
                for cache in (self.k, self.v)
            )
            rows = self.q[first : first + q_len]
            expected, _ = attention(rows, k, v, scale=SCALE, **rule)
            amplitude, _ = attention(rows, k, v.abs(), scale=SCALE, **rule)
            assert_close(f"request {request}", out[first : first + q_len], expected, amplitude=amplitude)
            first += q_len


@pytest.mark.parametrize("where", ["additional_config", "hf_config"])
def test_by_name(config: Any, where: str) -> None:
    """From --additional-config, or from the model's own config.json."""
    if where == "additional_config":
        config.additional_config = {"fi_backend": ASKED, "of another plug-in": 1}
    else:
        config.model_config.hf_config = SimpleNamespace(fi_backend=ASKED)
    layer, step = make_layer(config, "model.layers.0.attn"), Step()
    out = step.run(layer, make_builder(config, ["model.layers.0.attn"]).build(0, step.common))
    step.check(out, slopes=SLOPES)
    with pytest.raises(AssertionError):
        step.check(out)


def test_the_command_line_goes_before_the_model(config: Any) -> None:
    config.additional_config = {"fi_backend": {}}
    config.model_config.hf_config = SimpleNamespace(fi_backend=ASKED)
    layer, step = make_layer(config, "layer"), Step()
    step.check(step.run(layer, make_builder(config, ["layer"]).build(0, step.common)))


def test_layers_of_several_variants_share_what_they_can(config: Any, plugins: Plugins) -> None:
    config.model_config.hf_config = SimpleNamespace(model_type="llama")
    rules: dict[int, tuple[LayerVariant | None, dict[str, Any]]] = {
        0: (None, {}),
        1: (scaled(2.0), {"v_scale": 2.0}),
        2: (scaled(0.5), {"v_scale": 0.5}),
        3: (LayerVariant("soft_cap", {"cap": 1.5}), {"soft_cap": 1.5}),
        4: (scaled(3.0), {"v_scale": 3.0, "window_left": 8}),
    }
    asked = decide(plugins, lambda layer: rules[layer.index][0])
    names = [f"model.layers.{index}.attn" for index in rules]
    layers = [
        make_layer(config, name, sliding_window=9 if index == 4 else None) for index, name in enumerate(names)
    ]
    builder, step = make_builder(config, names), Step()
    assert len(builder.attention) == 4
    before = counters().snapshot().plans
    metadata = builder.build(0, step.common)
    assert counters().snapshot().plans - before == 4
    for layer, (_, rule) in zip(layers, rules.values(), strict=True):
        step.check(step.run(layer, metadata), **rule)
    assert [(each.name, each.index) for each in asked] == list(zip(names, rules, strict=True))
    first = asked[0]
    assert (first.engine, first.spec.num_qo_heads, first.device.type) == ("vllm", HEADS, "cpu")
    assert first.tensor_parallel == (0, 1)
    assert first.hf_config.model_type == "llama"


def test_the_loaded_model_is_asked_before_memory_is_measured(
    config: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = decide(plugins, lambda _: scaled(2.0))
    layer, step = make_layer(config, "model.layers.7.attn"), Step()
    assert not asked
    layer.impl.process_weights_after_loading(torch.float32)
    assert [each.index for each in asked] == [7]
    monkeypatch.setattr("fi_backend.core.jit.load", lambda spec: pytest.fail(f"{spec.name} is loaded late"))
    layer.impl.process_weights_after_loading(torch.float32)  # weights are reloaded
    builder = make_builder(config, ["model.layers.7.attn"])
    assert len(asked) == 1
    step.check(step.run(layer, builder.build(0, step.common)), v_scale=2.0)


def test_tensors_are_read_anew(config: Any, plugins: Plugins) -> None:
    slopes = SLOPES.clone()
    decide(plugins, lambda _: LayerVariant(ALIBI, {"slopes": slopes}))
    layer, step = make_layer(config, "layer"), Step()
    metadata = make_builder(config, ["layer"]).build(0, step.common)
    step.check(step.run(layer, metadata), slopes=SLOPES)
    slopes.mul_(-1)
    step.check(step.run(layer, metadata), slopes=-SLOPES)


@pytest.mark.parametrize(("variant", "nodes"), [(OUTPUT_SCALE, 1), (ALIBI, 0)])
def test_prefixes_are_shared_unless_rows_are_told_apart(
    config: Any, plugins: Plugins, variant: AttentionVariant, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = variant.params
    decide(plugins, lambda _: LayerVariant(variant, {name: SLOPES}))
    config.scheduler_config.max_num_seqs = 16
    config.model_config.max_model_len = 4096
    layer, requests, pages = make_layer(config, "layer"), 12, 120
    common, kv_len = make_common([1] * requests, [4 * BLOCK] * requests), pages * BLOCK + 5
    common.seq_lens = common.seq_lens_cpu_upper_bound = torch.full((requests,), kv_len, dtype=torch.int32)
    common.max_seq_len = kv_len
    table = torch.arange(1, pages + 2, dtype=torch.int32).repeat(requests, 1)
    table[:, pages] += torch.arange(requests, dtype=torch.int32)
    common.block_table_tensor = table
    random = torch.Generator().manual_seed(1)
    cache = torch.randn(int(table.max()) + 1, *make_cache().shape[1:], generator=random)
    q = torch.randn(requests, HEADS, HEAD_DIM, generator=random)
    before, outputs = counters().snapshot().prefix_nodes, []
    for without in ("", "sharing"):
        monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
        metadata = make_builder(config, ["layer"]).build(0, common)
        outputs.append(layer.impl.forward(layer, q, q, q, cache, metadata, torch.full_like(q, math.nan)))
    assert counters().snapshot().prefix_nodes - before == nodes
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_the_part_of_a_tensor_parallel_rank(
    config: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.parallel_config.tensor_parallel_size = 2
    monkeypatch.setattr(translate.compat, "tensor_parallel_rank", lambda: 1)
    asked = decide(plugins, lambda _: LayerVariant(None))
    make_layer(config, "layer").impl.process_weights_after_loading(torch.float32)
    assert asked[0].tensor_parallel == (1, 2)


@pytest.mark.parametrize(
    ("asked", "options", "kind", "text"),
    [
        ({"variant": "unheard"}, {}, ValueError, "expected one of alibi, .*; got 'unheard'"),
        ({"varient": "alibi"}, {}, ValueError, r"additional_config\['fi_backend'\]: .* got 'varient'"),
        ({"variant": "flash_sigmoid"}, {"sinks": torch.zeros(HEADS)}, UnsupportedError, "sinks: expected F"),
    ],
)
def test_refused_when_the_layer_is_built(
    config: Any, asked: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    config.additional_config = {"fi_backend": asked}
    with pytest.raises(kind, match=text):
        FiAttentionImpl(HEADS, HEAD_DIM, SCALE, KV_HEADS, **options)


def test_refused_when_the_weights_are_loaded(config: Any) -> None:
    config.additional_config = {"fi_backend": {"variant": "soft_cap"}}
    layer = make_layer(config, "model.layers.0.attn")
    with pytest.raises(ValueError, match=r"layer model\..*: variant, asked for by name: .*expected cap"):
        layer.impl.process_weights_after_loading(torch.float32)
