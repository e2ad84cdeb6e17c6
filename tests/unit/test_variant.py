# SPDX-License-Identifier: Apache-2.0
"""Declarations of variants: what is refused, and how errors of the compiler are told."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from variant_cases import ORACLES, Oracle, VariantBatch, check_variant, logits

from fi_backend import AttentionSpec, AttentionVariant, BatchAttention, BuildError, TensorParam
from fi_backend.core.sharing import flat_reason
from fi_backend.core.variant_args import VariantArguments
from fi_backend.hooks import Plugins, hookimpl

SPEC = AttentionSpec(4, 2, 64, dtype="float32")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "Upper"}, r"name: expected \[a-z\]"),
        ({"params": {"a b": "float32"}}, "params: expected names"),
        ({"params": {"double": "float32"}}, "params: expected names"),
        ({"params": {"x": "float64"}}, r"params\['x'\]: expected a TensorParam or one of float32"),
        ({"params": {f"p{i}": "int32" for i in range(9)}}, "at most 8 scalars; got 9"),
        ({"defaults": {"y": 1.0}}, "defaults: expected names of params; got 'y'"),
        ({"logits_transform": 7}, "logits_transform: expected C"),
        ({"logits_transform": "logit;"}, "logits_transform: expected a body that returns"),
        ({"key_reduce": "return x[0];"}, "key_reduce: expected key_transform with it"),
        ({"key_turns": "return 0.0f;"}, "key_turns: expected key_transform with it"),
        ({"key_turns_if": "return true;"}, "key_turns_if: expected key_turns with it"),
        ({"key_turns_evenly": True}, "key_turns_evenly: expected key_turns with it"),
        ({"key_turns_neighbours": True}, "key_turns_neighbours: expected key_turns with it"),
        (
            dict.fromkeys(("key_turns", "key_reduce", "key_transform"), "return 0.0f;"),
            "key_turns: expected None beside key_reduce",
        ),
        ({"headers": {"../x.h": ""}}, "headers: expected a name"),
    ],
)
def test_a_wrong_declaration_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        AttentionVariant(**{"name": "wrong", **fields})


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float64", (1,)), ("int32", ()), ("int32", (0,)), ("int32", ("heads",)), ("int32", (1,) * 5)],
)
def test_a_wrong_tensor_is_refused(dtype: str, shape: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match="expected"):
        TensorParam(dtype, shape)  # type: ignore[arg-type]


PARAMS = AttentionVariant(
    name="params",
    params={
        "factor": "float32",
        "count": "int32",
        "on": "bool",
        "slopes": TensorParam("float32", ("num_qo_heads",)),
        "other": TensorParam("int32", (None, 2), optional=True),
    },
    defaults={"factor": 1.0, "on": True},
    logits_transform="return params.on ? logit * params.factor + params.count : logit;",
)
GOOD = {"count": 3, "slopes": torch.zeros(4)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"count": 3}, "variant_args: expected slopes, which variant params declares"),
        ({**GOOD, "extra": 1}, "has the parameters factor, count, on, slopes, other; got 'extra'"),
        ({**GOOD, "count": 1.5}, "count: expected a number of type int32; got 1.5"),
        ({**GOOD, "count": 2**31}, "count: expected int32; got 2147483648"),
        ({**GOOD, "factor": float("nan")}, "factor: expected a number; got NaN"),
        ({**GOOD, "slopes": [0.0]}, "slopes: expected a torch tensor; got list"),
        (7, "variant_args: expected a dict"),
    ],
)
def test_wrong_arguments_are_named(given: object, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        VariantArguments(PARAMS, CPU).values(given)  # type: ignore[arg-type]


def planned(variant: AttentionVariant) -> BatchAttention:
    from fi_backend import PageTable

    attention = BatchAttention(SPEC, max_requests=1, max_tokens=1, max_kv_len=16, variant=variant)
    lens = torch.tensor([16], dtype=torch.int32)
    table = PageTable.from_block_table(torch.zeros(1, 1, dtype=torch.int32), lens, page_size=16)
    attention.plan(torch.tensor([0, 1], dtype=torch.int32), table)
    return attention


def test_the_kernel_checks_tensors() -> None:
    attention = planned(PARAMS)
    q, cache = torch.zeros(1, 4, 64), torch.zeros(1, 16, 2, 64)
    for slopes, text in (
        (torch.zeros(3), r"slopes: expected shape \[4\]; got \[3\]"),
        (torch.zeros(4).double(), "slopes: expected float32; got float64"),
        (torch.zeros(8)[::2], "slopes: expected a contiguous tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            attention.run(q, cache, cache, variant_args={"count": 0, "slopes": slopes})
    with pytest.raises(ValueError, match=r"other: expected shape \[any, 2\]; got \[2, 3\]"):
        attention.run(q, cache, cache, variant_args={**GOOD, "other": torch.zeros(2, 3).int()})
    attention.run(q, cache, cache, variant_args=GOOD)


BROKEN = AttentionVariant(
    name="broken",
    logits_transform="""
        const float twice = logit * 2;
        return twice + undeclared_thing;  // the line of the error
    """,
)
BROKEN_VALUES = AttentionVariant(
    name="broken_values",
    value_transform="""
        const int at = d + undeclared_thing;  // the line of the other error
        return x[at];
    """,
)


@pytest.mark.parametrize(
    ("variant", "place"),
    [(BROKEN, "the line of the error"), (BROKEN_VALUES, "the line of the other error")],
    ids=["logits", "values"],
)
def test_an_error_of_the_compiler_points_at_the_users_line(variant: AttentionVariant, place: str) -> None:
    with pytest.raises(BuildError) as error:
        BatchAttention(SPEC, max_requests=1, max_tokens=1, max_kv_len=1, variant=variant)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if f"// {place}" in text)
    first = str(error.value).splitlines()[:2]
    assert first[0] == f"variant {variant.name} does not compile:"
    assert f"{Path(__file__).name}:{line}" in first[1]
    assert "undeclared_thing" in first[1]


def test_a_path_without_a_result_does_not_compile() -> None:
    variant = AttentionVariant(name="halfway", logits_transform="if (qo_head_idx == 0) return logit;")
    with pytest.raises(BuildError, match="return"):
        BatchAttention(SPEC, max_requests=1, max_tokens=1, max_kv_len=1, variant=variant)


def test_headers_scalars_and_scalar_bodies(tmp_path: Path) -> None:
    """A body for single keys, with a condition, is called for each of them."""
    (tmp_path / "clip.h").write_text(
        "#pragma once\nFI_DEVICE float clip(float x) { return x > 1 ? 1 : x; }\n"
    )
    variant = AttentionVariant(
        name="clipped",
        params={"odd_only": "bool"},
        headers={"clip.h": tmp_path / "clip.h"},
        logits_transform="if (params.odd_only && kv_idx % 2 == 0) return logit;\nreturn clip(logit);",
    )

    def oracle(r, args):
        x = logits(r)
        return torch.where((r.kv_pos % 2 == 0)[None, None], x, x.clamp(max=1))

    check_variant(variant, Oracle(logits=oracle), {"odd_only": True}, VariantBatch())


def test_what_depends_on_a_row_plans_flat() -> None:
    from fi_backend import variants

    assert flat_reason(SPEC, variants.SOFT_CAP) is None
    assert flat_reason(SPEC, variants.QK_NORM) is None
    assert flat_reason(SPEC, variants.CHANNEL_SCALES) is None
    for variant, text in (
        (variants.ALIBI, "logits_transform depends on q_pos"),
        (variants.ROPE, "query_transform depends on q_pos"),
        (variants.SINK_WINDOW, "logits_mask"),
        (variants.SLIDING_WINDOW, "visible_range"),
        (variants.FLASH_SIGMOID, "without softmax"),
        (variants.OUTPUT_GATE, "output_transform depends on token_idx"),
        (
            AttentionVariant(name="own", value_transform="return x[d] * batch_idx;"),
            "value_transform depends on batch_idx",
        ),
    ):
        assert text in str(flat_reason(SPEC, variant))


@pytest.mark.parametrize("name", ["soft_cap", "qk_norm"])
def test_a_composed_plan_gives_the_same(name: str) -> None:
    from variant_cases import arguments

    batch = VariantBatch(q_lens=(1, 1, 1), kv_lens=(300, 280, 400), shared_pages=16, split=True)
    attention = check_variant(name, ORACLES[name], arguments(name, batch), batch)
    assert attention.tally is not None
    assert attention.tally.take().nodes > 0


def test_a_variant_compiles_with_torch() -> None:
    attention = planned(PARAMS)
    q, cache = torch.randn(1, 4, 64), torch.randn(1, 16, 2, 64)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return attention.run(x, cache, cache, variant_args=GOOD) * 2

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), twice(q))


def test_plugins_are_asked_for_variants() -> None:
    class Plugin:
        @hookimpl
        def fi_backend_attention_variants(self) -> object:
            return self.variants

    plugin = Plugin()
    registered = Plugins()
    registered.register(plugin, "mine")
    plugin.variants = [PARAMS]
    assert registered.variants() == {"params": PARAMS}
    for wrong, text in (
        (7, "a sequence"),
        ([7], "instances of AttentionVariant"),
        ([PARAMS, PARAMS], "'params', which is taken"),
    ):
        plugin.variants = wrong
        with pytest.raises((TypeError, ValueError), match=f"plug-in 'mine': .*{text}"):
            registered.variants()


def test_the_place_of_a_declaration_is_that_of_its_caller() -> None:
    assert PARAMS.declared_in == inspect.getsourcefile(test_plugins_are_asked_for_variants)
