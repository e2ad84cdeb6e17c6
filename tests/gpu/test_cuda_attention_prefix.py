# SPDX-License-Identifier: Apache-2.0
"""Composed plans on CUDA: shared prefixes read once give what the oracle says, and what a flat plan gives.

Memory that must not be read is NaN: see shared_serving.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from attention_batch import counters
from examples import share
from gpu_device import device
from gpu_specs import spec
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal, assert_close
from plan_cases import COSTS
from shared_cases import Branch, SharedCase
from shared_serving import SharedServing, shared_case

from fi_backend.core.plan import PREFIX
from fi_backend.core.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

TREES: dict[str, list[Branch]] = {
    "one level": [(0,)] * 9,
    "groups": [(0,)] * 5 + [(1,)] * 3 + [(2,)] + [()] + [(3,)] * 2,
    "two levels": [(0, 0)] * 3 + [(0, 1)] * 4 + [(0,)] * 2 + [(1,)],
    "three levels": [(0, 0, 0)] * 3 + [(0, 0, 1)] * 2 + [(0, 1)] * 2 + [(0,), (1, 0), (1, 0), (1, 1)],
}
LEVELS = {"one level": 1, "groups": 1, "two levels": 2, "three levels": 3}
GROUPS = (1, 4, 5, 7, 8, 16, 64)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "64": ("64", {}),
    "128": ("128", {}),
    "256": ("256", {}),
    "192x128": ("192x128", {}),
    "fp8 80": ("e4m3 80", {"page_size": 64}),
    "fp8": ("e4m3 128", {}),
    "fp8 256": ("e4m3 256", {}),
    "e5m2": ("e5m2 128", {}),
    "soft cap": ("transform 128", {"alibi": False, "logits_soft_cap": 8.0}),
    "sinks": ("128", {"sinks": True}),
    "not causal": ("64", {"causal": False}),
    "soft cap, sinks, fp8": ("transform e4m3 64", {"alibi": False, "logits_soft_cap": 30.0, "sinks": True}),
}


def tree(
    layer: AttentionSpec, name: str, *, q_lens: tuple[int, ...] = (1,), own: tuple[int, ...] = (1, 40, 17, 90)
) -> SharedCase:
    """The requests of TREES in any order; query and own lengths go round."""
    paths = list(TREES[name])
    random.Random(name).shuffle(paths)
    tokens = {path[: i + 1]: 300 - 70 * i for path in paths for i in range(len(path))}
    each = [q_lens[n % len(q_lens)] for n in range(len(paths))]
    return shared_case(layer, paths, tokens, each, [q + own[n % len(own)] for n, q in enumerate(each)])


def check(layer: AttentionSpec, case: SharedCase, *, nodes: int, num_ctas: int = 24, **scales: Any) -> None:
    """The composed plan against the oracle and the flat plan, twice bit for bit."""
    engine = SharedServing(layer, [case], **scales)
    expected = engine.expected(case)
    attn = engine.attention(num_ctas=num_ctas)
    engine.fill(case)
    plan = engine.plan(attn, case)
    assert plan.header["num_nodes"] >= nodes, "nothing is shared; the test tests nothing"
    engine.run(attn)
    out, lse = engine.results()
    engine.check(case, (out, lse), expected=expected)
    engine.workspace.fill_(7)
    engine.fill(case)
    engine.run(attn)
    for name, again, first in zip(("out", "lse"), engine.results(), (out, lse), strict=True):
        assert_bitwise_equal(f"{name} of a second run", again, first)
    assert not counters(attn).any(), "a launch left faults, or counters that it must reset"
    flat = engine.step(attn, case, share=False)
    tokens = sum(case.q_lens)
    assert_close("composed and flat", out[:tokens], flat[0][:tokens].double(), amplitude=expected[2], slack=2)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("module", ["64", "128", "256", "e4m3 128"])
@pytest.mark.parametrize("q_lens", [(1,), (1, 2, 3, 4, 1)], ids=str)
def test_every_group_size(group: int, module: str, q_lens: tuple[int, ...]) -> None:
    """Rows of a node straddle its tiles, and members that need two tiles stay flat."""
    heads = 2 if group <= 16 else 1
    layer = spec(module, group * heads, heads)
    # One member fills a tile of the widest heads: nothing can be read together.
    nodes = 2 if group < 64 else int(layer.head_dim <= 128)
    check(layer, tree(layer, "two levels", q_lens=q_lens), nodes=nodes)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("q_lens", [(1,), (1, 2, 3, 4), (1, 40, 2, 1, 150)], ids=str)
@pytest.mark.parametrize("num_ctas", [1, 132])
def test_every_tree_and_page_size(name: str, page_size: int, q_lens: tuple[int, ...], num_ctas: int) -> None:
    """Decodes and drafts in a tree, beside prefill chunks with the same prefix, which stay flat."""
    layer = spec("128", 8, 2, page_size=page_size)
    check(layer, tree(layer, name, q_lens=q_lens), nodes=1, num_ctas=num_ctas)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TREES)
def test_every_variant(variant: str, name: str) -> None:
    module, options = VARIANTS[variant]
    layer = spec(module, 8, 2, **options)
    scales = {"k_scale": (0.5, 1.25), "v_scale": (2.0, 0.25)} if "e4m3" in module or "e5m2" in module else {}
    check(layer, tree(layer, name, q_lens=(1, 1, 3)), nodes=LEVELS[name], **scales)


@pytest.mark.parametrize("module", ["128", "64"])
def test_many_requests_behind_one_long_prefix(module: str) -> None:
    """Tiles of 128 rows, chunks of the prefix on many CTAs, and units of 32 requests a tile."""
    layer = spec(module, 8, 2)
    case = shared_case(layer, [(0,)] * 70, {(0,): 4096}, [1] * 70, [1 + n % 60 for n in range(70)])
    check(layer, case, nodes=1, num_ctas=132)
    check(layer, case, nodes=1, num_ctas=4)


def test_one_query_head_each_reports_to_128_units() -> None:
    layer = spec("64", 2, 2)
    case = shared_case(layer, [(0,)] * 150, {(0,): 640}, [1] * 150, [3] * 150)
    engine = SharedServing(layer, [case])
    plan = engine.plan(engine.attention(), case)
    lists = [int(plan.reports[item["unit"]]) for item in plan.items if item["flags"] & PREFIX]
    assert max(lists) == 128
    check(layer, case, nodes=1)


@pytest.mark.parametrize("module", ["128", "e4m3 128", "256"])
@pytest.mark.parametrize("num_ctas", [132, 3])
def test_twenty_runs_give_the_same_bits(module: str, num_ctas: int) -> None:
    """Whoever completes a unit folds it, alone or with others: by a node's item or by an own one."""
    layer = spec(module, 8, 2)
    cases = [
        tree(layer, "three levels", q_lens=(1, 2, 1, 4), own=(1, 400, 30, 2)),
        shared_case(layer, [(0,)] * 40, {(0,): 2000}, [1] * 40, [1 + 11 * (n % 4) for n in range(40)]),
    ]
    for case in cases:
        engine = SharedServing(layer, [case])
        attn = engine.attention(num_ctas=num_ctas)
        first = engine.step(attn, case)
        for n in range(19):
            engine.workspace.fill_(n)
            engine.fill(case)
            engine.run(attn)
            for name, actual, good in zip(("out", "lse"), engine.results(), first, strict=True):
                assert_bitwise_equal(f"{name} of run {n}", actual, good)
        assert not counters(attn).any()


@pytest.mark.parametrize("module", ["64", "128", "256", "e4m3 128", "transform 128"])
def test_any_forest_equals_the_oracle(module: str) -> None:
    @share(15)
    @given(drawn_cases(module))
    def run(drawn: tuple[AttentionSpec, SharedCase, int]) -> None:
        layer, case, num_ctas = drawn
        check(layer, case, nodes=0, num_ctas=num_ctas)

    run()


@st.composite
def drawn_cases(draw: st.DrawFn, module: str) -> tuple[AttentionSpec, SharedCase, int]:
    """Trees of any shape in any order of requests, some of them empty, some of them chunks of a prompt."""
    group = draw(st.sampled_from(GROUPS))
    heads = draw(st.integers(1, 3)) if group <= 8 else 1
    options = {"page_size": draw(st.sampled_from((1, 3, 16, 64))), "causal": draw(st.booleans())}
    if "transform" in module:
        options |= {"alibi": False, "logits_soft_cap": draw(st.sampled_from((2.0, 30.0)))}
    layer = spec(module, group * heads, heads, sinks=draw(st.booleans()), **options)
    branch = st.lists(st.integers(0, 1), max_size=3).map(tuple)
    paths = draw(st.lists(branch, min_size=1, max_size=12))
    runs = sorted({path[: i + 1] for path in paths for i in range(len(path))})
    tokens = {run: draw(st.sampled_from((1, 64, 100, 500, 1500))) for run in runs}
    lengths = st.sampled_from((1, 1, 1, 2, 4, 0, 33))
    q_lens = [draw(lengths) for _ in paths]
    own = [q + draw(st.sampled_from((0, 0, 1, 20, 300))) for q in q_lens]
    return layer, shared_case(layer, paths, tokens, q_lens, own), draw(st.sampled_from((1, 16, 132)))


@pytest.mark.parametrize("planned_queues", [False, True])
@pytest.mark.parametrize("costs", ["gpu", "eager"])
def test_queues_and_the_default_costs(planned_queues: bool, costs: str) -> None:
    layer = spec("128", 32, 8)
    case = shared_case(layer, [(0,)] * 24, {(0,): 3000}, [1] * 24, [50 + n for n in range(24)])
    engine = SharedServing(layer, [case])
    attn = engine.attention(num_ctas=132, planned_queues=planned_queues, costs=COSTS[costs])
    engine.fill(case)
    assert engine.plan(attn, case).header["num_nodes"] == 1
    engine.run(attn)
    engine.check(case, engine.results())
    assert not counters(attn).any()


def test_room_for_nodes_changes_no_bit_of_flat_batches() -> None:
    """The same lengths without a common page: plans and bits of a BatchAttention that knows no sharing."""
    layer = spec("128", 8, 2)
    case = tree(layer, "two levels", q_lens=(1, 2, 60))
    apart = replace(case, paths=((),) * len(case.paths), own=case.kv_lens)
    engine = SharedServing(layer, [apart])
    results = [
        engine.step(engine.attention(sharing=sharing), apart, share=sharing is not None)
        for sharing in (None, case.sharing)
    ]
    for name, actual, good in zip(("out", "lse"), *results, strict=True):
        assert_bitwise_equal(f"{name} on {device()}", actual, good)
