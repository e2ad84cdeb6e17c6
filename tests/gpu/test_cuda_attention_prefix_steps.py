# SPDX-License-Identifier: Apache-2.0
"""Composed plans over time: other forests in one captured graph, and lengths that change after the plan."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from attention_batch import counters
from gpu_device import capture, no_waiting, only_on_cuda, synchronize
from gpu_specs import spec
from numeric import assert_bitwise_equal
from plan_cases import COSTS
from shared_cases import SharedCase
from shared_serving import SharedServing, shared_case
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.planner import CostModel
from fi_backend.core.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

PAGES, LENGTHS = 1, 2  # bits of the faults word
MODULES = ["128", "256", "e4m3 128"]
SPLITS = {"split": COSTS["eager"], "one chunk": CostModel(min_chunk=4096, alpha=0, part_cost=0)}


def steps(layer: AttentionSpec) -> dict[str, SharedCase]:
    """Forests of every shape within one capacity, and steps without any."""
    order = random.Random(5)
    deep = [(0, 0, 0)] * 3 + [(0, 0, 1)] * 3 + [(0, 1)] * 2 + [(0,), (1,), (1,), ()]
    order.shuffle(deep)
    tokens = {path[: i + 1]: 260 for path in deep for i in range(len(path))}
    many = [1, 2, 1, 3, 1, 1, 4, 1, 1, 1, 2, 1]
    return {
        "deep": shared_case(layer, deep, tokens, many, [q + 30 * (n % 3) for n, q in enumerate(many)]),
        "fan": shared_case(layer, [(0,)] * 12, {(0,): 1500}, [1] * 12, [1 + 40 * n for n in range(12)]),
        "pairs": shared_case(
            layer, [(n % 6,) for n in range(12)], {(n,): 200 * n + 20 for n in range(6)}, [1] * 12, [9] * 12
        ),
        "apart": shared_case(layer, [()] * 12, {}, [1] * 12, [700 - 50 * n for n in range(12)]),
        "mixed": shared_case(layer, [(0,)] * 5, {(0,): 900}, [1, 70, 1, 3, 1], [60, 80, 1, 100, 500]),
        "one": shared_case(layer, [(0,)], {(0,): 100}, [1], [5]),
    }


ORDER = ("fan", "deep", "apart", "pairs", "mixed", "one", "deep", "fan", "mixed", "apart", "fan")


@pytest.mark.parametrize("module", ["64", *MODULES])
@pytest.mark.parametrize("num_ctas", [132, 8])
def test_one_graph_replays_steps_with_other_forests(module: str, num_ctas: int) -> None:
    layer = spec(module, 8, 2)
    cases = steps(layer)
    engine = SharedServing(layer, list(cases.values()))
    eager, attn = engine.attention(num_ctas=num_ctas), engine.attention(num_ctas=num_ctas)
    engine.step(attn, cases["pairs"])
    replay = capture(lambda: engine.run(attn))
    checked = set()
    for name in ORDER:
        case = cases[name]
        good = engine.step(eager, case)
        if name not in checked:
            engine.check(case, good)
            checked.add(name)
        engine.fill(case)
        with no_waiting():
            plan = engine.plan(attn, case)
        assert (plan.header["num_nodes"] > 0) == (name not in ("apart", "one"))
        replay()
        for what, actual, expected in zip(("out", "lse"), engine.results(), good, strict=True):
            assert_bitwise_equal(f"{what} of {name}", actual, expected)
        assert not counters(attn).any(), f"{name}: the launch left faults, or counters that it must reset"


class Faulty:
    """A planned step of twelve requests, its right results, and what a spoilt run leaves of them."""

    def __init__(self, module: str, costs: CostModel) -> None:
        only_on_cuda()
        self.engine, self.attn, self.case = prepared(module, costs)
        self.plan = self.engine.plan(self.attn, self.case)
        self.composed = [int(u["request"]) for u in self.plan.units if u["token"] >= 0]
        assert sorted(self.composed) == [0, 1, 2, 3, 4, 5, 7, 8, 9]
        assert self.plan.header["num_nodes"] == 4
        self.good = self.fresh()
        assert not counters(self.attn).any()

    def fresh(self) -> tuple[Tensor, Tensor]:
        return self.engine.step(self.attn, self.case)

    def ready(self) -> SharedServing:
        self.engine.fill(self.case)
        self.engine.plan(self.attn, self.case)
        return self.engine

    def expect(self, bad: set[int], fault: int) -> None:
        """Run: rows of the requests `bad` become NaN, all others keep their bits."""
        self.engine.run(self.attn)
        synchronize()
        words = counters(self.attn)
        assert words[1] == fault
        words[1] = 0
        assert not words.any(), "the launch left counters that it must reset"
        starts = self.engine.lengths(self.case)[0].tolist()
        for name, actual, good in zip(("out", "lse"), self.engine.results(), self.good, strict=True):
            for request in range(len(self.case.q_lens)):
                rows = slice(starts[request], starts[request + 1])
                if request in bad:
                    assert actual[rows].isnan().all(), f"{name} of request {request}"
                else:
                    assert_bitwise_equal(f"{name} of request {request}", actual[rows], good[rows])
            assert actual[starts[-1] :].isnan().all(), f"{name}: rows behind the batch were written"
        again = self.fresh()
        assert not counters(self.attn).any()
        for name, actual, good in zip(("out", "lse"), again, self.good, strict=True):
            assert_bitwise_equal(f"{name} afterwards", actual, good)

    def members(self, run: tuple[int, ...]) -> set[int]:
        """Composed requests behind a branch."""
        return {r for r in self.composed if self.case.paths[r][: len(run)] == run}


@cache
def prepared(module: str, costs: CostModel) -> tuple[SharedServing, BatchAttention, SharedCase]:
    layer = spec(module, 8, 2)
    paths = [(0, 0), (1,), (0, 0), (0, 1), (1,), (0, 1), (), (0, 0), (0,), (1,)]
    tokens = {(0,): 320, (1,): 200, (0, 0): 160, (0, 1): 96}
    q_lens = [1, 2, 1, 1, 1, 3, 1, 1, 1, 2]
    case = shared_case(layer, paths, tokens, q_lens, [q + 25 * (n % 4) for n, q in enumerate(q_lens)])
    engine = SharedServing(layer, [case])
    return engine, engine.attention(costs=costs), case


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("page", [-1, 2**31 - 1, 10**6])
@pytest.mark.parametrize(("place", "run"), [(0, (0,)), (19, (0,)), (20, (0, 0)), (29, (0, 0))])
def test_page_ids_outside_the_cache(
    module: str, costs: CostModel, page: int, place: int, run: tuple[int, ...]
) -> None:
    """In the row of the node's first member, where its pages are looked up: every member is spoilt."""
    step = Faulty(module, costs)
    engine = step.ready()
    engine.blocks[0, place] = page
    step.expect(step.members(run), PAGES)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("kv_len", ["before the prefix's end", "query inside", 0, -1, 2**31 - 1])
def test_lengths_that_no_longer_reach_the_prefix(module: str, costs: CostModel, kv_len: Any) -> None:
    """Request 2 is no node's first member: the others keep their bits."""
    step = Faulty(module, costs)
    engine = step.ready()
    lengths = {"before the prefix's end": 470, "query inside": 480}
    engine.kv_lens[2] = lengths.get(kv_len, kv_len)
    step.expect({2}, LENGTHS)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(("kv_len", "run"), [(479, (0, 0)), (100, (0,)), (-1, (0,)), (10**9, (0,))])
def test_lengths_of_the_member_that_holds_the_pages(
    module: str, costs: CostModel, kv_len: int, run: tuple[int, ...]
) -> None:
    """Request 0 shrinks into a node, or breaks its row: the node's members cannot be right."""
    step = Faulty(module, costs)
    engine = step.ready()
    engine.kv_lens[0] = kv_len
    step.expect({0} | step.members(run), LENGTHS)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
def test_queries_that_begin_elsewhere_than_planned(module: str, costs: CostModel) -> None:
    """The nodes took the planned rows: composed requests whose tokens moved are NaN, flat ones are right."""
    step = Faulty(module, costs)
    engine = step.ready()
    engine.starts[1:] += 1  # request 0 has two tokens now, more than planned
    engine.q[1:] = engine.q[:-1].clone()
    engine.run(step.attn)
    synchronize()
    assert counters(step.attn)[1] == LENGTHS
    out, _ = engine.results()
    starts = step.engine.lengths(step.case)[0].tolist()
    for request in step.composed[1:]:
        rows = out[starts[request] + 1 : min(starts[request + 1] + 1, engine.tokens)]
        assert rows.isnan().all(), f"request {request}"
    alone = starts[6]
    assert_bitwise_equal("request 6", out[alone + 1], step.good[0][alone])
    step.fresh()
    assert not counters(step.attn).any()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
def test_queries_beyond_those_that_exist(module: str, costs: CostModel) -> None:
    """q ends before the nodes' last token: it is not read, and its request is NaN."""
    step = Faulty(module, costs)
    engine = step.ready()
    whole = engine.q, engine.out, engine.lse
    tokens = sum(step.case.q_lens) - 1
    engine.q, engine.out, engine.lse = (x[:tokens] for x in whole)
    try:
        engine.run(step.attn)
        synchronize()
    finally:
        engine.q, engine.out, engine.lse = whole
    assert counters(step.attn)[1] == LENGTHS
    out, lse = engine.results()
    first = tokens - 1  # the last request had two
    assert_bitwise_equal("out", out[:first], step.good[0][:first])
    assert_bitwise_equal("lse", lse[:first], step.good[1][:first])
    assert out[first:].isnan().all()
    step.fresh()
    assert not counters(step.attn).any()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
def test_own_lengths_change_on_the_device_after_the_plan(module: str, costs: CostModel) -> None:
    """As long as the prefix lies before the queries, whatever lies behind it may grow and shrink."""
    only_on_cuda()
    layer = spec(module, 8, 2)
    paths, tokens = [(0,)] * 6 + [(1,)] * 3, {(0,): 640, (1,): 128}
    q_lens = [1, 1, 2, 1, 4, 1, 1, 3, 1]
    planned = shared_case(layer, paths, tokens, q_lens, [200] * 9)
    cases = [shared_case(layer, paths, tokens, q_lens, [n] * 9) for n in (200, 4, 199, 130, 64, 400, 900)]
    engine = SharedServing(layer, cases)
    attn = engine.attention(costs=costs, num_ctas=24 if costs is SPLITS["split"] else 2)
    for case in cases:
        engine.fill(case)
        starts, kv_lens = engine.lengths(planned)
        forest = planned.forest()
        plan = attn.plan(
            engine.starts, engine.table, qo_indptr_host=starts, kv_lens_host=kv_lens, forest=forest
        )
        assert plan is not None
        assert plan.header["num_nodes"] == 2
        engine.run(attn)
        engine.check(case, engine.results())
        assert not counters(attn).any()


def test_a_captured_step_may_lose_its_last_queries() -> None:
    """Requests without tokens any more end quietly, as members of a node too."""
    only_on_cuda()
    layer = spec("128", 8, 2)
    case = shared_case(layer, [(0,)] * 8, {(0,): 480}, [1] * 8, [20] * 8)
    engine = SharedServing(layer, [case])
    attn = engine.attention()
    good = engine.step(attn, case)
    engine.fill(case)
    engine.plan(attn, case)
    engine.starts[6:] = 5
    engine.run(attn)
    out, lse = engine.results()
    for name, actual, expected in (("out", out, good[0]), ("lse", lse, good[1])):
        assert_bitwise_equal(name, actual[:5], expected[:5])
        assert actual[5:].isnan().all()
    assert not counters(attn).any()
