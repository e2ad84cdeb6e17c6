# SPDX-License-Identifier: Apache-2.0
"""One captured graph for steps of every kind: the bits of an eager run, whoever makes the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, counters
from gpu_device import capture, device, no_waiting
from gpu_specs import spec
from numeric import assert_bitwise_equal
from serving_step import ORDER, STEPS, Serving, Step

from fi_backend.core.attention import BatchAttention
from fi_backend.core.planner import CostModel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("128", {}),
    "fp16 64": ("fp16 64", {"page_size": 1}),
    "window, sinks": ("64", {"window_left": 300, "sinks": True}),
    "256": ("256", {"page_size": 64}),
    "fp8": ("e4m3 128", {"page_size": 3}),
    "invariant": ("invariant 128", {}),
    "invariant fp8": ("invariant e4m3 128", {"window_left": 500}),
}
COSTS = {"short chunks": SPLIT_COSTS, "default": CostModel(min_chunk=64)}


def serving(layer: str) -> Serving:
    module, options = LAYERS[layer]
    return Serving(spec(module, 8, 2, **options))


def captured(engine: Serving, attn: BatchAttention, *, on_device: bool) -> Callable[[], Any]:
    """A graph of run(), with the device planner before it when `on_device`."""
    engine.fill(STEPS["two chunks"])
    engine.plan(attn, STEPS["two chunks"])
    engine.run(attn)
    if on_device:
        engine.plan(attn, None)

    def step() -> None:
        if on_device:
            engine.plan(attn, None)
        engine.run(attn)

    return capture(step)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("on_device", [False, True], ids=["host plan", "device plan"])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_one_graph_replays_decode_mixed_and_prefill_steps(
    layer: str, on_device: bool, costs: CostModel
) -> None:
    engine = serving(layer)
    eager = engine.attention(costs=costs)
    attn = engine.attention(costs=costs)
    replay = captured(engine, attn, on_device=on_device)
    checked = set()
    for name in ORDER:
        step = STEPS[name]
        engine.fill(step)
        engine.plan(eager, step)
        engine.run(eager)
        out, lse = engine.results()
        if name not in checked:
            engine.check(step)
            checked.add(name)
        engine.fill(step)
        if not on_device:
            engine.plan(attn, step)
        replay()
        again, lse_again = engine.results()
        assert_bitwise_equal(f"out of {name}", again, out)
        assert_bitwise_equal(f"lse of {name}", lse_again, lse)
        assert not counters(attn).any(), f"{name}: the launch left faults, or counters that it must reset"


@pytest.mark.parametrize("layer", ["bf16", "fp8", "256", "window, sinks"])
def test_lengths_change_on_the_device_after_the_plan(layer: str) -> None:
    """An engine that plans for upper bounds, or replays a graph with the plan of an earlier step."""
    engine = serving(layer)
    attn = engine.attention(costs=SPLIT_COSTS)
    replay = captured(engine, attn, on_device=False)
    planned = Step((1, 60, 1, 3), (1500, 600, 900, 800), 2)
    for kv_lens in (
        (1500, 600, 900, 800), (1499, 599, 899, 799), (1437, 537, 837, 737), (3, 60, 1, 3),
        (0, 61, 65, 64), (1501, 601, 901, 801), (2000, 2000, 2000, 2000), (20, 2000, 0, 2000),
    ):  # fmt: skip
        actual = replace(planned, kv_lens=kv_lens)
        engine.fill(actual)
        engine.plan(attn, planned)
        replay()
        engine.check(actual)
        assert not counters(attn).any()


@pytest.mark.parametrize("layer", ["invariant", "invariant fp8"])
def test_bounds_of_the_host_do_not_reach_the_bits_of_the_invariant_mode(layer: str) -> None:
    """Inside a graph, split KV: exact lengths, upper bounds and the greatest length of all."""
    engine = serving(layer)
    attn = engine.attention(costs=SPLIT_COSTS)
    replay = captured(engine, attn, on_device=False)
    step = STEPS["mixed"]
    first = None
    for bound in (0, 1, 63, 64, 400, 2000):
        planned = replace(step, kv_lens=tuple(min(2000, n + bound) for n in step.kv_lens))
        engine.fill(step)
        engine.plan(attn, planned)
        replay()
        first = first or engine.results()
        for name, actual, expected in zip(("out", "lse"), engine.results(), first, strict=True):
            assert_bitwise_equal(f"{name}, bound + {bound}", actual, expected)
    engine.check(step)


@pytest.mark.parametrize("layer", ["invariant", "invariant fp8"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host plan", "device plan"])
def test_chunked_prefill_in_one_graph_gives_the_bits_of_the_whole(layer: str, on_device: bool) -> None:
    """A prompt of 160 tokens at once, and in parts beside decodes, all in the same graph."""
    engine = serving(layer)
    attn = engine.attention(costs=COSTS["default"])
    replay = captured(engine, attn, on_device=on_device)
    whole = Step((160,), (160,), 9)
    prompt = engine.queries(whole)

    def run(step: Step, begin: int, end: int, at: int) -> list[torch.Tensor]:
        """Rows of prompt tokens [begin, end), which stand at row `at` of the step."""
        engine.fill(step)
        engine.q[at : at + end - begin] = prompt[begin:end].to(device())
        if not on_device:
            engine.plan(attn, step)
        replay()
        return [x[at : at + end - begin] for x in engine.results()]

    expected = run(whole, 0, 160, 0)
    for cuts in ((0, 160), (0, 1, 160), (0, 64, 159, 160), (0, 17, 50, 90, 157)):
        for n, (begin, end) in enumerate(pairwise(cuts)):
            decodes = 0 if end - begin > 150 else n + 1
            # Request 0 keeps the prompt's pages; the decodes come behind it.
            step = Step((end - begin, *(1,) * decodes), (end, *(600 + 100 * n,) * decodes), 20 + n)
            for actual, rows in zip(run(step, begin, end, 0), expected, strict=True):
                assert_bitwise_equal(f"tokens {begin}..{end}", actual, rows[begin:end])


@pytest.mark.parametrize("on_device", [False, True], ids=["host plan", "device plan"])
def test_fifty_steps_through_one_graph_without_waiting(on_device: bool) -> None:
    """Plans are uploaded while earlier replays still run; no step may see the plan of another one."""
    engine = serving("bf16")
    attn = engine.attention(costs=SPLIT_COSTS)
    replay = captured(engine, attn, on_device=on_device)
    names = [list(STEPS)[n * 3 % len(STEPS)] for n in range(50)]
    expected = {}
    for name in set(names):
        engine.fill(STEPS[name])
        engine.plan(attn, STEPS[name])
        engine.run(attn)
        expected[name] = engine.results()
    inputs = {
        name: [x.to(device()) for x in (*STEPS[name].padded(), engine.queries(STEPS[name]))]
        for name in expected
    }
    outs = torch.empty(50, *engine.out.shape, dtype=engine.out.dtype, device=device())
    with no_waiting():
        for n, name in enumerate(names):
            starts, kv_lens, q = inputs[name]
            engine.starts.copy_(starts)
            engine.kv_lens.copy_(kv_lens)
            engine.q[: q.shape[0]].copy_(q)
            engine.out.fill_(float("nan"))
            if not on_device:
                engine.plan(attn, STEPS[name])
            replay()
            outs[n].copy_(engine.out)
    for n, name in enumerate(names):
        assert_bitwise_equal(f"step {n}, {name}", outs[n].cpu(), expected[name][0])
