# SPDX-License-Identifier: Apache-2.0
"""Data that only the device sees and that is wrong: no illegal access, NaN where it matters, and a report.

The host cannot check device tensors without waiting for them. Rows that such data touches become NaN, all
other requests keep their bits, a word of the plan buffer says what was met, and FI_BACKEND_DEBUG=1 raises.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, counters
from gpu_device import device, int32, only_on_cuda, synchronize
from gpu_specs import spec
from numeric import assert_bitwise_equal
from serving_step import Serving, Step
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.planner import CostModel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

PAGES, LENGTHS = 1, 2  # bits of the faults word
PLANNED_NOTHING = 1 << 10
MODULES = ["128", "256", "e4m3 128", "invariant 128"]
# Requests 1 and 3 are the ones that go wrong: a decode over many chunks, and a chunk of a prompt.
STEP = Step((1, 1, 20, 30, 2), (700, 1500, 300, 900, 65), 11)
SPLITS = {"split": SPLIT_COSTS, "one chunk": CostModel(min_chunk=4096)}


@cache
def prepared(module: str, costs: CostModel) -> tuple[Serving, BatchAttention]:
    engine = Serving(spec(module, 8, 2))
    return engine, engine.attention(costs=costs)


class Faulty:
    """A planned step, its right results, and the comparison of what a spoilt run leaves."""

    def __init__(self, module: str, costs: CostModel) -> None:
        only_on_cuda()
        self.engine, self.attn = prepared(module, costs)
        self.good = self.run()
        assert not counters(self.attn).any()

    def plan(self) -> None:
        self.engine.table.indices.copy_(self.engine.blocks_host)
        self.engine.fill(STEP)
        self.engine.plan(self.attn, STEP)

    def run(self) -> tuple[Tensor, Tensor]:
        self.plan()
        self.engine.run(self.attn)
        return self.engine.results()

    def expect(self, bad: dict[int, str], fault: int) -> None:
        """Run what is planned. bad: by request "nan", "partly" NaN, "untouched" or "any"."""
        self.engine.run(self.attn)
        synchronize()
        words = counters(self.attn)
        assert words[1] == fault
        words[1] = 0
        assert not words.any(), "the launch left counters that it must reset"
        starts = STEP.padded()[0].tolist()
        for name, actual, good in zip(("out", "lse"), self.engine.results(), self.good, strict=True):
            for request in range(len(STEP.q_lens)):
                rows = slice(starts[request], starts[request + 1])
                what = f"{name} of request {request}"
                kind = bad.get(request, "good")
                if kind == "good":
                    assert_bitwise_equal(what, actual[rows], good[rows])
                elif kind in ("nan", "untouched"):  # untouched memory is NaN too
                    assert actual[rows].isnan().all(), what
                elif kind == "partly":
                    assert actual[rows].isnan().any(), what
            assert actual[STEP.tokens :].isnan().all(), f"{name}: rows behind the batch were written"
        # Nothing of it stays: the next plan clears the faults.
        again = self.run()
        assert not counters(self.attn).any()
        for name, actual, good in zip(("out", "lse"), again, self.good, strict=True):
            assert_bitwise_equal(f"{name} afterwards", actual, good)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("page", [-1, -(2**31), 2**31 - 1, 8 * 125 + 2])
@pytest.mark.parametrize("place", [0, 17, 55])
def test_page_ids_outside_the_cache(module: str, costs: CostModel, page: int, place: int) -> None:
    """place: of the bad id in the rows of the table; the last one is seen by some queries of request 3."""
    step = Faulty(module, costs)
    step.plan()
    table = step.engine.table.indices
    table[1, place] = table[3, place] = page
    step.expect({1: "nan", 3: "nan" if place < 54 else "partly"}, PAGES)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("kv_len", [2001, 2**31 - 1, -1, -(2**31)])
def test_lengths_beyond_the_pages_of_a_row(module: str, costs: CostModel, kv_len: int) -> None:
    step = Faulty(module, costs)
    step.plan()
    step.engine.kv_lens[[1, 3]] = kv_len
    step.expect({1: "nan", 3: "nan"}, LENGTHS)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
def test_queries_beyond_those_that_exist(module: str, costs: CostModel) -> None:
    """q ends before qo_indptr does: the last request loses rows, and its others cannot be right."""
    step = Faulty(module, costs)
    step.plan()
    whole, engine = (step.engine.q, step.engine.out, step.engine.lse), step.engine
    tokens = STEP.tokens - 1
    engine.q, engine.out, engine.lse = (x[:tokens] for x in whole)
    engine.run(step.attn)
    synchronize()
    assert counters(step.attn)[1] == LENGTHS
    engine.q, engine.out, engine.lse = whole
    out, lse = engine.results()
    first = tokens - 1
    assert_bitwise_equal("out", out[:first], step.good[0][:first])
    assert_bitwise_equal("lse", lse[:first], step.good[1][:first])
    assert out[first:].isnan().all()
    assert lse[first:].isnan().all()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("end", [10**6, 2**31 - 1, -1, -(2**31)])
def test_starts_that_lie_outside_of_q(module: str, costs: CostModel, end: int) -> None:
    """Only request 4 has such an end; for the others nothing is wrong."""
    step = Faulty(module, costs)
    step.plan()
    step.engine.starts[5] = end
    step.expect({4: "any"}, LENGTHS)


@pytest.mark.parametrize("module", ["128", "256", "e4m3 128", "invariant 128"])
@pytest.mark.parametrize("costs", SPLITS.values(), ids=SPLITS)
def test_requests_that_lost_their_queries_after_the_plan(module: str, costs: CostModel) -> None:
    """The last two requests have no tokens any more; their planned items, split ones too, end quietly."""
    step = Faulty(module, costs)
    step.plan()
    step.engine.starts[4:] = 22
    step.engine.starts[3] = 22
    step.expect({3: "untouched", 4: "untouched"}, 0)


@pytest.mark.parametrize("module", ["128", "invariant 128"])
def test_more_queries_than_planned_are_left_alone(module: str) -> None:
    """Rows of a request beyond its planned rows are not computed; those before have their right positions."""
    only_on_cuda()
    engine = Serving(spec(module, 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    planned, actual = Step((1, 1), (700, 900), 1), Step((1, 17), (700, 900), 1)
    engine.fill(actual)
    engine.plan(attn, actual)
    engine.run(attn)
    out, _ = engine.results()
    engine.fill(actual)
    engine.plan(attn, planned)
    engine.run(attn)
    again, _ = engine.results()
    assert not counters(attn).any()
    torch.testing.assert_close(again[:2], out[:2], rtol=0.02, atol=0.01)
    assert again[2:].isnan().all()


def test_an_invariant_plan_of_too_short_lengths_says_so() -> None:
    """Later chunks have as many partial states as were planned, so that longer requests cannot be right."""
    only_on_cuda()
    engine = Serving(spec("invariant 128", 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    actual = Step((1, 1), (700, 1500), 1)
    engine.fill(actual)
    engine.plan(attn, replace(actual, kv_lens=(700, 400)))
    engine.run(attn)
    out, lse = engine.results()
    assert counters(attn)[1] == LENGTHS
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert torch.isfinite(out[0]).all()


@pytest.mark.parametrize("module", ["128", "invariant 128"])
def test_lengths_that_break_the_limits_plan_nothing_on_the_device(module: str) -> None:
    only_on_cuda()
    step = Faulty(module, SPLIT_COSTS)
    step.engine.fill(STEP)
    step.engine.kv_lens[2] = 2001
    step.engine.plan(step.attn, None)
    step.expect(dict.fromkeys(range(5), "untouched"), PLANNED_NOTHING)


@pytest.mark.parametrize("table", ["csr", "ragged"])
def test_rows_of_other_tables_that_lie_outside(table: str) -> None:
    """CSR rows behind the end of indices; contiguous rows behind the end of the cache."""
    only_on_cuda()
    layer = spec("128", 8, 2)
    k, v = torch.randn(2, 40 * 16, 2, 128).bfloat16().to(device())
    q = torch.randn(2, 8, 128).bfloat16().to(device())
    attn = BatchAttention(layer, max_requests=2, max_tokens=2, max_kv_len=640, device=device(), num_ctas=8)
    starts, lens = int32(0, 1, 2), int32(320, 320)
    good, bad = ((0, 20, 40), (0, 20, 41)) if table == "csr" else ((0, 320, 640), (0, 320, 641))
    results = []
    for bounds in (good, bad):
        if table == "csr":
            indices = torch.arange(40, dtype=torch.int32).to(device())
            rows = PageTable.from_csr(
                int32(*bounds).to(device()), indices, page_size=16, kv_lens=lens.to(device())
            )
            caches = k.view(40, 16, 2, 128), v.view(40, 16, 2, 128)
        else:
            rows, caches = PageTable.ragged(int32(*bounds).to(device())), (k, v)
        attn.plan(starts.to(device()), rows, qo_indptr_host=starts, kv_lens_host=lens)
        results.append(attn.run(q, *caches, out=torch.full_like(q, 7.0)).cpu())
        assert counters(attn)[1] == (0 if bounds is good else LENGTHS)
    assert_bitwise_equal("request 0", results[1][0], results[0][0])
    assert results[1][1].isnan().all()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: e.table.indices[1, 17].fill_(10**6), "^page table: expected page ids inside the KV cache"),
        (lambda e: e.table.indices[1, 90].fill_(-1), "^page table: expected page ids inside the KV cache"),
        (lambda e: e.kv_lens[1].fill_(2001), "^kv_lens, qo_indptr: expected lengths within the rows"),
        (lambda e: e.kv_lens[1].fill_(-1), "^kv_lens, qo_indptr: expected lengths within the rows"),
    ],
    ids=["page too large", "negative page", "too long", "negative length"],
)
@pytest.mark.parametrize("module", ["128", "256", "invariant 128"])
def test_debug_mode_raises_and_the_next_step_is_right(
    spoil: Any, message: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Faulty(module, SPLIT_COSTS)
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    for _ in range(3):
        step.plan()
        spoil(step.engine)
        with pytest.raises(ValueError, match=message):
            step.engine.run(step.attn)
        again = step.run()
        assert_bitwise_equal("out", again[0], step.good[0])
