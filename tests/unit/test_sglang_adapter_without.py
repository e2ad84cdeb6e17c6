# SPDX-License-Identifier: Apache-2.0
"""FI_BACKEND_WITHOUT under SGLang: each mechanism is left out alone, and answers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_graph import Graph
from sglang_step import Engine
from test_sglang_adapter_radix import served

from fi_backend.adapters.sglang import step
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import counters
from fi_backend.core.plan import PREFIX


class Plans:
    """The KV lengths and the order of the requests of each plan, None for those of a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[list[int] | None] = []
        self.orders: list[list[int]] = []
        original = BatchAttention.plan

        def plan(self_: BatchAttention, *args: Any, **named: Any) -> Any:
            known = named["kv_lens_host"]
            assert (known is None) == (named["qo_indptr_host"] is None)
            self.lengths.append(None if known is None else known.tolist())
            made = original(self_, *args, **named)
            items = made.items[made.items["flags"] & PREFIX == 0]
            self.orders.append(list(dict.fromkeys(items["request"].tolist())))
            return made

        monkeypatch.setattr(BatchAttention, "plan", plan)


@pytest.mark.parametrize(("without", "graph"), [("sharing", True), ("sharing", False), ("lpt", False)])
def test_prefixes_are_shared_unless_they_are_left_out(
    monkeypatch: pytest.MonkeyPatch, without: str, graph: bool
) -> None:
    """Every layer is compared with the oracle on the way."""
    monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
    before = counters().snapshot().shared_plans
    served(graph)
    shared = counters().snapshot().shared_plans - before
    assert shared == (0 if without == "sharing" else 3 + (not graph))


@pytest.mark.parametrize("without", ["", "lpt"])
def test_the_order_of_the_items(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
    plans = Plans(monkeypatch)
    engine = Engine(Shape(windows=(-1,)))
    for lengths in ((5, 70, 30), (1, 1, 1)):
        batch = engine.step(ForwardMode.EXTEND, lengths)
        engine.backend.init_forward_metadata(batch)
        engine.check_layer(engine.layers[0], batch)
    in_order = [0, 1, 2]
    assert plans.orders[1] == (in_order if without else [1, 2, 0])


@pytest.mark.parametrize("without", ["", "device_plan"])
def test_lengths_that_the_host_does_not_know(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """As when SGLang speculates; played on the CPU, which the back end takes for a GPU."""
    monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
    engine = Engine(Shape(windows=(20, -1)))
    engine.backend._arrays._on_device = True
    plans = Plans(monkeypatch)
    for mode, lengths in ((ForwardMode.EXTEND, (5, 70, 1)), (ForwardMode.DECODE, (1, 1, 1))):
        batch = engine.step(mode, lengths)
        batch.seq_lens_cpu = None
        engine.backend.init_forward_metadata(batch)
        for layer in engine.layers:
            engine.check_layer(layer, batch)
    copied = [[5, 70, 1]] * 2 + [[6, 71, 2]] * 2
    assert plans.lengths == (copied if without else [None] * 4)


def test_lengths_in_which_requests_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "device_plan")
    engine = Engine(Shape())
    engine.backend._arrays._on_device = True
    plans = Plans(monkeypatch)
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 1))
    batch.extend_seq_lens_cpu = None
    engine.backend.init_forward_metadata(batch)
    engine.check_layer(engine.layers[0], batch)
    assert plans.lengths == [[5, 70, 1]]


def test_replays_of_a_graph_and_nothing_while_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "device_plan")
    engine = Engine(Shape(windows=(-1,)))
    engine.backend._arrays._on_device = True
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 1))
    engine.backend.init_forward_metadata(batch)
    engine.check_layer(engine.layers[0], batch)
    graph = Graph(engine, ForwardMode.DECODE)
    plans = Plans(monkeypatch)
    for _ in range(2):
        batch = engine.step(ForwardMode.DECODE, (1, 1, 1))
        batch.seq_lens_cpu = None
        graph.replay(batch)
    assert plans.lengths == [[6, 71, 2, 1], [7, 72, 3, 1]], "the fourth request is padding"
    monkeypatch.setattr(step, "may_wait", lambda _: False)
    batch = engine.step(ForwardMode.DECODE, (1, 1, 1))
    batch.seq_lens_cpu = None
    graph.replay(batch)
    assert plans.lengths[2:] == [None]


@pytest.mark.parametrize("without", ["sharing", "lpt", "device_plan"])
def test_memory_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    sizes = []
    for value in ("", without):
        monkeypatch.setenv("FI_BACKEND_WITHOUT", value)
        engine = Engine(Shape())
        batch = engine.step(ForwardMode.EXTEND, (5, 70, 1))
        engine.backend.init_forward_metadata(batch)
        engine.check_layer(engine.layers[0], batch)
        (attention,) = engine.backend._layers._attention.values()
        sizes.append((attention.workspace_size(), attention.planner.capacity))
    assert sizes[0] == sizes[1]


def test_an_unknown_word_is_refused_before_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "sharing,LPT")
    with pytest.raises(ValueError, match=r"FI_BACKEND_WITHOUT: expected any of .*; got 'LPT'"):
        Engine(Shape())
