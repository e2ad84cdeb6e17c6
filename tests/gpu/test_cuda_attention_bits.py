# SPDX-License-Identifier: Apache-2.0
"""Equal bits on CUDA: run to run, in any batch and any split of the batch-invariant mode, on any pages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, EngineState
from engine_memory import Layout
from gpu_batches import batch
from gpu_device import device
from gpu_specs import spec
from numeric import assert_bitwise_equal
from sequences import Sequence, compute
from torch import Tensor

from fi_backend.core.planner import CostModel
from fi_backend.core.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

NORMAL = ["128", "256", "e4m3 128", "transform 128"]
INVARIANT = ["invariant 64", "invariant 256", "invariant e4m3 128", "invariant transform 64"]
Result = tuple[Tensor, Tensor]


def assert_same(name: str, actual: Result, expected: Result) -> None:
    assert_bitwise_equal(f"out of {name}", actual[0], expected[0])
    assert_bitwise_equal(f"lse of {name}", actual[1], expected[1])


def results(layer: AttentionSpec, parts: list[Any], **options: Any) -> list[Result]:
    return compute(layer, parts, **({"device": device(), "num_ctas": 132} | options))


def rows(result: Result, begin: int, end: int) -> Result:
    return result[0][begin:end], result[1][begin:end]


@pytest.mark.parametrize("num_ctas", [132, 3])
@pytest.mark.parametrize("module", [*NORMAL, *INVARIANT])
def test_twenty_runs_give_the_same_bits(module: str, num_ctas: int) -> None:
    """Other CTAs draw other items in every run, and tiles of every height follow each other in one CTA."""
    lens = {"q_lens": (1, 300, 1, 17, 30, 1, 64, 9), "kv_lens": (5000, 700, 3000, 17, 64, 2000, 64, 900)}
    costs = CostModel(min_chunk=64)
    state = EngineState(batch(spec=spec(module, 8, 2), num_ctas=num_ctas, costs=costs, **lens))
    attn = state.attention()
    first = state.run(attn)
    for n in range(19):
        state.workspace.fill_(n)
        assert_same(f"run {n}", state.run(attn), first)


@pytest.mark.parametrize("module", [*NORMAL, *INVARIANT])
def test_bits_follow_from_the_plan_and_not_from_queues_pages_or_strides(module: str) -> None:
    layer = spec(module, 6, 2)
    parts = [(Sequence.random(layer, n, n), n - q, n) for n, q in ((900, 1), (333, 50), (64, 1), (5, 5))]
    first = results(layer, parts, num_ctas=32)
    layouts = [
        Layout(),
        Layout(table="token"),
        Layout(table="csr", k="hnd", v="strided"),
        Layout(k="packed", v="packed"),
    ]
    for n, layout in enumerate(layouts):
        for planned in (False, True):
            again = results(layer, parts, num_ctas=32, planned_queues=planned, layout=layout, page_seed=n)
            for request, (a, b) in enumerate(zip(again, first, strict=True)):
                assert_same(f"request {request} in {layout}, planned_queues={planned}", a, b)


@pytest.mark.parametrize("module", [*NORMAL, *INVARIANT])
def test_every_page_size_gives_the_same_bits(module: str) -> None:
    first = None
    for page_size in (16, 1, 3, 64, 128):
        layer = spec(module, 8, 2, page_size=page_size, window_left=600)
        parts = [(Sequence.random(layer, n, n), n - q, n) for n, q in ((1500, 1), (333, 100), (64, 2))]
        again = results(layer, parts)
        first = first or again
        for request, (a, b) in enumerate(zip(again, first, strict=True)):
            assert_same(f"request {request}, page size {page_size}", a, b)


@pytest.mark.parametrize("module", INVARIANT)
@pytest.mark.parametrize("grid", [64, 192, 512])
def test_any_chunked_prefill_in_any_batch_gives_the_same_bits(module: str, grid: int) -> None:
    """The whole prompt at once against its parts, beside other requests, under any number of CTAs."""
    random = torch.Generator().manual_seed(grid)
    costs = replace(SPLIT_COSTS, invariant_grid=grid)
    for length, options in ((700, {}), (333, {"window_left": 130}), (64, {"sinks": True})):
        layer = spec(module, 8, 2, **options)
        sequence = Sequence.random(layer, length, seed=1)
        [whole] = results(layer, [(sequence, 0, length)], num_ctas=1, costs=costs)
        for cuts in ([length - 1], [1, 2, 63], [17, 33], [length // 2, length - 3], [60], range(1, 50, 7)):
            for n, (begin, end) in enumerate(pairwise([0, *cuts, length])):
                others = [
                    (Sequence.random(layer, m, seed=m), max(0, m - 9 * n - 1), m) for m in (5, 150, 290)
                ]
                place = n % 4
                slack, num_ctas = (0, 1, 63, 1000)[n % 4], (1, 24, 132, 4000)[(n + length) % 4]
                queues = bool(torch.randint(2, (), generator=random))
                again = results(
                    layer,
                    [*others[:place], (sequence, begin, end), *others[place:]],
                    slack=slack,
                    num_ctas=num_ctas,
                    planned_queues=queues,
                    costs=costs,
                    page_seed=n,
                )
                assert_same(f"tokens {begin}..{end} of {length}", again[place], rows(whole, begin, end))


@pytest.mark.parametrize("module", INVARIANT)
@pytest.mark.parametrize("costs", [SPLIT_COSTS, CostModel()], ids=["short chunks", "default"])
def test_each_request_of_a_mixed_batch_alone_gives_the_same_bits(module: str, costs: CostModel) -> None:
    layer = spec(module, 8, 2)
    lens = ((3000, 1), (900, 300), (64, 64), (1, 1), (1025, 3), (513, 17), (512, 1))
    parts = [(Sequence.random(layer, n, n), n - q, n) for n, q in lens]
    together = results(layer, parts, costs=costs)
    for num_ctas in (1, 7, 132, 1000):
        for n, part in enumerate(parts):
            [alone] = results(layer, [part], num_ctas=num_ctas, costs=costs)
            assert_same(f"request {n}, {num_ctas} CTAs", alone, together[n])


@pytest.mark.parametrize("group", [1, 3, 8, 20])
def test_the_batch_size_does_not_pick_another_tile(group: int) -> None:
    """Speculation of any depth, down to single tokens, alone and among other requests."""
    layer = spec("invariant 128", 2 * group, 2)
    sequence = Sequence.random(layer, 1333, 0)
    [alone] = results(layer, [(sequence, 1325, 1333)], costs=CostModel())
    others = [(Sequence.random(layer, 100, n), 100 - q, 100) for n, q in enumerate((1, 60, 8, 1, 30))]
    beside = results(layer, [*others, (sequence, 1325, 1333)], costs=CostModel())[-1]
    assert_same("a batch of six", beside, alone)
    for begin in range(1325, 1333):
        [single] = results(layer, [(sequence, begin, begin + 1)], costs=CostModel())
        assert_same(f"token {begin}", single, rows(alone, begin - 1325, begin - 1324))


def test_without_the_mode_another_split_gives_other_bits() -> None:
    """What the tests above would show if the mode were off: they compare bits that can differ."""
    layer = spec("128", 4, 1)
    parts = [(Sequence.random(layer, 3000, 0), 2999, 3000)]
    [one], [many] = results(layer, parts, num_ctas=1), results(layer, parts, num_ctas=40)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same("40 CTAs", many, one)
    torch.testing.assert_close(many[1], one[1])
