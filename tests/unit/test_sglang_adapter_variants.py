# SPDX-License-Identifier: Apache-2.0
"""Variants under SGLang without an engine: by name or by layer, in graphs, compared with the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

import sglang_step
from layer_plugins import decide, shipped_plugins
from oracle import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_graph import Graph
from sglang_step import Engine, run_all

from fi_backend import AttentionVariant, UnsupportedError
from fi_backend.adapters.sglang.backend import FiAttnBackend
from fi_backend.hooks import LayerVariant, Plugins
from fi_backend.variants import ALIBI, OUTPUT_SCALE

HEADS = Shape().heads
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0])
BY_NAME = {"fi_backend": {"variant": "alibi", "variant_args": {"slopes": SLOPES.tolist()}}}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return shipped_plugins(monkeypatch)


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the oracle is told besides, in turn: every layer compares one request after another."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(sglang_step, "attention", lambda *given, **rule: attention(*given, **rule, **told[0]))
    return told


def engine_by_name(monkeypatch: pytest.MonkeyPatch, config: Any, **shape: Any) -> Engine:
    make = sglang_step.make_runner

    def make_runner(*given: Any, **server: Any) -> Any:
        runner = make(*given, **server)
        runner.model_config.hf_config = SimpleNamespace(**config)
        return runner

    monkeypatch.setattr(sglang_step, "make_runner", make_runner)
    return Engine(Shape(**shape))


@pytest.mark.parametrize("shape", [{}, {"page_size": 16, "windows": (20, -1), "hybrid": True}], ids=str)
def test_by_name(monkeypatch: pytest.MonkeyPatch, rules: list[dict[str, Any]], shape: dict[str, Any]) -> None:
    rules.append({"slopes": SLOPES})
    run_all(engine_by_name(monkeypatch, BY_NAME, **shape))
    rules[0] = {}
    with pytest.raises(AssertionError, match="layer 0, request 0"):
        run_all(engine_by_name(monkeypatch, BY_NAME, **shape))


def test_layers_decided_one_by_one(plugins: Plugins, rules: list[dict[str, Any]]) -> None:
    by_layer = (LayerVariant(ALIBI, {"slopes": SLOPES}), None, LayerVariant("soft_cap", {"cap": 1.5}))
    asked = decide(plugins, lambda layer: by_layer[layer.index])
    engine = Engine(Shape(windows=(-1, -1, -1)))
    assert [(each.engine, each.name, each.index) for each in asked] == [
        ("sglang", str(index), index) for index in range(3)
    ]
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 1))
    engine.backend.init_forward_metadata(batch)
    for layer, rule in zip(engine.layers, ({"slopes": SLOPES}, {}, {"soft_cap": 1.5}), strict=True):
        engine.shape = Shape(cap=rule.pop("soft_cap", 0.0))
        rules[:] = [rule]
        engine.check_layer(layer, batch)
    assert len(engine.backend._step.planned) == 3


def test_graphs_read_tensors_anew(plugins: Plugins, rules: list[dict[str, Any]]) -> None:
    slopes = SLOPES.clone()
    decide(plugins, lambda _: LayerVariant(ALIBI, {"slopes": slopes}))
    rules.append({"slopes": slopes})
    engine = Engine(Shape(page_size=16))
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 33))
    engine.backend.init_forward_metadata(batch)
    for layer in engine.layers:
        engine.check_layer(layer, batch)
    graph = Graph(engine, ForwardMode.DECODE)
    for factor in (1.0, -2.0):
        slopes.mul_(factor)
        graph.replay(engine.step(ForwardMode.DECODE, (1, 1, 1)))


@pytest.mark.parametrize(("variant", "shares"), [(OUTPUT_SCALE, True), (ALIBI, False)])
def test_room_for_shared_prefixes(plugins: Plugins, variant: AttentionVariant, shares: bool) -> None:
    """Prefixes are read once where nothing in the variant tells rows apart."""
    (name,) = variant.params
    decide(plugins, lambda _: LayerVariant(variant, {name: SLOPES}))
    engine = Engine(Shape(), disable_radix_cache=False)
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 33))
    engine.backend.init_forward_metadata(batch)
    planned, _ = engine.backend._layers.planned(engine.backend._step, engine.layers[0], sinks=False)
    assert (planned.tally is not None) is shares


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_other_back_ends_beside_a_variant_are_refused(plugins: Plugins, kind: str) -> None:
    decide(plugins, lambda _: LayerVariant(ALIBI, {"slopes": SLOPES}))
    with pytest.raises(UnsupportedError, match=f"{kind}_attention_backend=triton: attention layer 0 runs"):
        Engine(Shape(), attention_backend="fi", **{f"{kind}_attention_backend": "triton"})


def test_wrong_arguments_are_refused_when_the_back_end_is_made(plugins: Plugins) -> None:
    decide(plugins, lambda _: LayerVariant(ALIBI, {"slopes": SLOPES[:2]}))
    runner = sglang_step.make_runner(Shape())
    with pytest.raises(ValueError, match=r"layer 0: variant, plug-in 'decides': slopes: expected float32"):
        FiAttnBackend(runner)


def test_the_part_of_a_tensor_parallel_rank(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fi_backend.adapters.sglang.compat.tensor_parallel_rank", lambda: 1)
    asked = decide(plugins, lambda _: None)
    Engine(Shape(), tp_size=2)
    assert {each.tensor_parallel for each in asked} == {(1, 2)}
