# SPDX-License-Identifier: Apache-2.0
"""Which variant a layer of an engine runs: asked for by name, decided by a plug-in, or refused by name."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fi_backend import AttentionSpec, AttentionVariant, TensorParam, UnsupportedError
from fi_backend.adapters import layer_variants
from fi_backend.adapters.layer_variants import Asked, Chosen, asked_for, find_asked
from fi_backend.hooks import AttentionLayer, LayerVariant, Plugins, hookimpl

SPEC = AttentionSpec(4, 2, 32, dtype="float32")
CPU = torch.device("cpu")
BIASED = AttentionVariant(
    name="biased",
    params={"bias": TensorParam("float32", ("num_qo_heads",)), "factor": "float32", "steps": "int32"},
    defaults={"steps": 1},
    logits_transform="return logit * params.factor + params.bias[qo_head_idx];",
)
GATED = AttentionVariant(
    name="gated",
    params={"gate": TensorParam("float32", ("tokens", None), optional=True)},
    output_transform="return params.gate ? o * params.gate(token_idx, 0) : o;",
)
SIGMOID = AttentionVariant(name="weighted", softmax=False, logits_transform="return sigmoid(logit);")
GOOD = {"bias": torch.zeros(4), "factor": 0.5}


def layer(**changes: Any) -> AttentionLayer:
    fields: dict[str, Any] = {"engine": "vllm", "name": "model.layers.3.attn", "index": 3, "spec": SPEC}
    return AttentionLayer(**{**fields, "device": CPU, **changes})


def choose(layer: AttentionLayer) -> Chosen:
    return layer_variants.choose(layer, logging.getLogger("fi_backend.tests"))


def plugin(answer: Any) -> Any:
    class Answers:
        @hookimpl
        def fi_backend_layer_variant(self, layer: AttentionLayer) -> Any:
            return answer(layer) if callable(answer) else answer

    return Answers()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    """Plug-ins without those of installed packages; their variants are those of this file."""
    known = {variant.name: variant for variant in (BIASED, GATED, SIGMOID)}

    class Known:
        @hookimpl
        def fi_backend_attention_variants(self) -> Any:
            return tuple(known.values())

    found = Plugins()
    found.register(Known(), "known")
    monkeypatch.setattr(layer_variants, "plugins", lambda: found)
    monkeypatch.setattr(layer_variants, "_reported", set())
    monkeypatch.setattr("fi_backend.hooks.plugins", lambda: found)
    return found


def test_plain_attention_where_nobody_asks(registered: Plugins) -> None:
    registered.register(plugin(None), "without an opinion")
    assert choose(layer()) == Chosen(None, None)


def test_asked_for_by_name() -> None:
    given = {"bias": [0, 1, 2.5, 3], "factor": 2}
    chosen = choose(layer(variant="biased", variant_args=given))
    assert chosen.variant is BIASED
    assert chosen.args is not None
    assert chosen.args["factor"] == 2
    assert torch.equal(chosen.args["bias"], torch.tensor([0, 1, 2.5, 3]))
    assert given == {"bias": [0, 1, 2.5, 3], "factor": 2}


def test_each_variant_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for index, name in enumerate(("weighted", "gated", None, "weighted")):
            choose(layer(name=f"layer {index}", variant=name))
    assert [record.getMessage() for record in caplog.records] == [
        "attention layers run the variant weighted, asked for by name; the first is layer 0",
        "attention layers run the variant gated, asked for by name; the first is layer 1",
    ]


def test_a_plugin_decides_by_layer(registered: Plugins) -> None:
    asked = []

    def answer(layer: AttentionLayer) -> LayerVariant | None:
        asked.append(layer.index)
        return {0: LayerVariant(BIASED, GOOD), 1: LayerVariant(None)}.get(layer.index or 0)

    registered.register(plugin(answer), "by index")
    found = [choose(layer(index=index, variant="weighted")).variant for index in range(3)]
    assert found == [BIASED, None, SIGMOID]
    assert asked == [0, 1, 2]


def test_tensors_of_a_plugin_are_its_own(registered: Plugins) -> None:
    """What it writes into them later is what the next step reads, also if they are weights of the model."""
    weight = torch.nn.Parameter(torch.zeros(4))
    registered.register(plugin(LayerVariant("biased", {"bias": weight, "factor": 1.0})), "weights")
    chosen = choose(layer())
    assert chosen.args is not None
    bias = chosen.args["bias"]
    assert isinstance(bias, torch.Tensor)
    assert not bias.requires_grad
    with torch.no_grad():
        weight += 1
    assert torch.equal(bias, torch.ones(4))


def test_numbers_are_those_of_the_answer(registered: Plugins) -> None:
    args = dict(GOOD)
    registered.register(plugin(LayerVariant("biased", args)), "changes its mind")
    chosen = choose(layer())
    args["factor"] = 7.0
    assert chosen.args is not None
    assert chosen.args["factor"] == 0.5


WRONG: dict[str, tuple[LayerVariant, type[Exception], str]] = {
    "name": (LayerVariant("unheard"), ValueError, r"expected one of biased, .*; got 'unheard'"),
    "type": (LayerVariant(7), TypeError, "expected an AttentionVariant or the name"),  # type: ignore[arg-type]
    "no names": (LayerVariant("biased", [1.0]), TypeError, "args: expected a dict of names .* got list"),  # type: ignore[arg-type]
    "missing": (LayerVariant("biased"), ValueError, "expected bias, factor, which variant biased"),
    "unknown": (LayerVariant("biased", {**GOOD, "bais": 1}), ValueError, "got 'bais'"),
    "number": (LayerVariant("biased", {**GOOD, "factor": "1"}), TypeError, "factor: expected a number"),  # type: ignore[dict-item]
    "tensor": (LayerVariant("biased", {**GOOD, "bias": 1.0}), TypeError, "bias: expected a torch tensor"),
    "shape": (
        LayerVariant("biased", {**GOOD, "bias": torch.zeros(8)}),
        ValueError,
        r"bias: expected float32 \[4\]; got torch.float32 \[8\]",
    ),
    "dtype": (
        LayerVariant("biased", {**GOOD, "bias": torch.zeros(4, dtype=torch.float64)}),
        ValueError,
        r"bias: expected float32 \[4\]; got torch.float64 \[4\]",
    ),
    "strides": (
        LayerVariant("biased", {**GOOD, "bias": torch.zeros(8)[::2]}),
        ValueError,
        r"bias: expected a contiguous tensor on cpu; got strides \(2,\)",
    ),
    "device": (
        LayerVariant("biased", {**GOOD, "bias": torch.zeros(4, device="meta")}),
        ValueError,
        "bias: expected a contiguous tensor on cpu; got .* on meta",
    ),
    "of a step": (
        LayerVariant("gated", {"gate": torch.zeros(9, 1)}),
        UnsupportedError,
        "gate: its shape follows the tokens of a step",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_answers_name_layer_plugin_and_argument(registered: Plugins, case: str) -> None:
    answer, kind, text = WRONG[case]
    registered.register(plugin(answer), "mine")
    with pytest.raises(
        kind, match=rf"attention layer model\.layers\.3\.attn: variant, plug-in 'mine': .*{text}"
    ):
        choose(layer())


def test_an_optional_tensor_of_a_step_may_be_left_out(registered: Plugins) -> None:
    assert choose(layer(variant="gated")).variant is GATED


def test_answers_that_are_none(registered: Plugins) -> None:
    registered.register(plugin(BIASED), "hasty")
    with pytest.raises(TypeError, match=r"plug-in 'hasty': .*: expected a LayerVariant or None; got A"):
        choose(layer())


def test_two_answers_for_one_layer(registered: Plugins) -> None:
    for name in ("one", "two"):
        registered.register(plugin(LayerVariant("weighted")), name)
    with pytest.raises(ValueError, match=r"plug-in '\w+': .* one answer for layer model\..*; '\w+' has"):
        choose(layer())


def test_what_the_spec_forbids() -> None:
    sinks = AttentionSpec(4, 2, 32, dtype="float32", sinks=True)
    with pytest.raises(UnsupportedError, match="sinks: expected False with variant weighted"):
        choose(layer(spec=sinks, variant="weighted"))
    with pytest.raises(UnsupportedError, match="sinks: expected False with variant weighted"):
        find_asked(Asked("weighted"), sinks, CPU)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"bias": [1, 2, 3], "factor": 1}, r"bias: expected float32 \[4\]; got torch.float32 \[3\]"),
        ({"bias": ["a"], "factor": 1}, "bias: expected lists of numbers of type float32"),
        ({"bias": [0] * 4, "factor": [1]}, "factor: expected a number; got a list"),
        ({"bias": [0] * 4, "factor": 1, "steps": 1.5}, "steps: expected a number of type int32"),
    ],
)
def test_wrong_arguments_by_name(given: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"variant, asked for by name: {text}"):
        choose(layer(variant="biased", variant_args=given))


def test_lists_do_not_say_whose_heads_they_are() -> None:
    given = {"bias": [0] * 4, "factor": 1}
    with pytest.raises(UnsupportedError, match="bias: a list does not say which heads each of 2"):
        choose(layer(variant="biased", variant_args=given, tensor_parallel=(0, 2)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["recency"], r"additional_config\['fi_backend'\]: expected {\"variant\""),
        ({"varient": "recency"}, "expected the keys variant and variant_args; got 'varient'"),
        ({"variant": 7}, "variant: expected the name of a variant; got 7"),
        ({"variant": "recency", "variant_args": [1]}, r"variant_args: expected an object .*; got \[1\]"),
        ({"variant_args": {"x": 1}}, "variant_args: expected variant with it"),
    ],
)
def test_requests_that_cannot_be_read(given: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        asked_for("additional_config", given)


def test_requests_that_can() -> None:
    assert asked_for("hf_config", None) == asked_for("hf_config", {}) == Asked(None, {})
    assert asked_for("hf_config", {"variant": "a", "variant_args": {"b": 1}}) == Asked("a", {"b": 1})


@pytest.mark.parametrize("rank", [0, 1])
def test_the_example_answers_while_a_model_is_built(
    registered: Plugins, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Engines make the dtype of the model torch's default then; each rank gets its part of the heads."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "recency_attention"))
    registered.register(importlib.import_module("recency_attention"), "recency_attention")
    asked = {"variant": "recency", "variant_args": {"strength": 7.0, "layers": [3]}}
    torch.set_default_dtype(torch.bfloat16)
    try:
        chosen = choose(layer(tensor_parallel=(rank, 2), **asked))
        assert choose(layer(index=4, **asked)) == Chosen(None, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert chosen.args is not None
    assert chosen.args["power"].tolist() == [4.0 * rank + head for head in range(4)]
    with pytest.raises(ValueError, match="recency: expected strength and layers; got 'power'"):
        choose(layer(variant="recency", variant_args={"power": 1}))


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Callable[..., Any]:
        raise ModuleNotFoundError("No module named 'gadgets'")

    entry = SimpleNamespace(name="broken", load=load)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [entry])
    with pytest.raises(
        ImportError, match=r"plug-in 'broken' .* No module named 'gadgets'\. Mend its package"
    ):
        Plugins().load_entry_points()
