# SPDX-License-Identifier: Apache-2.0
"""Graphs under SGLang, without a GPU: addresses, padding, tables that the scheduler overwrites, counts."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.layers.attention import base_attn_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_graph import Graph
from sglang_step import Engine

from fi_backend.core.counters import counters
from fi_backend.errors import PlanError, UnsupportedError

SHAPES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "plain": (Shape(), {}),
    "page 16, windows and sinks": (Shape(page_size=16, windows=(20, -1)), {"sinks": True}),
    "hybrid pool, page 64": (Shape(page_size=64, windows=(20, -1, 35), hybrid=True), {}),
    "fp8 with scales": (Shape(kv_dtype="float8_e4m3fn", page_size=16), {"scale": 0.25}),
    "batch-invariant": (Shape(), {"enable_deterministic_inference": True}),
}
PREFILL, DECODES = (5, 70, 33), ((1, 1, 1), (1, 0, 1), (0, 1, 0), (1, 1, 1))


def prefilled(name: str = "plain", **server: Any) -> Engine:
    shape, options = SHAPES[name]
    engine = Engine(shape, **{**options, **server})
    batch = engine.step(ForwardMode.EXTEND, PREFILL)
    engine.backend.init_forward_metadata(batch)
    for layer in engine.layers:
        engine.check_layer(layer, batch)
    return engine


@pytest.mark.parametrize("name", SHAPES)
def test_replays_against_the_oracle(name: str) -> None:
    engine = prefilled(name)
    graph = Graph(engine, ForwardMode.DECODE)
    for lengths in DECODES:
        graph.replay(engine.step(ForwardMode.DECODE, lengths))


def test_steps_without_a_graph_come_between_replays() -> None:
    engine = prefilled("hybrid pool, page 64")
    graph = Graph(engine, ForwardMode.DECODE)
    for lengths in ((3, 60, 1), (0, 50, 0)):
        batch = engine.step(ForwardMode.EXTEND, lengths)
        engine.backend.init_forward_metadata(batch)
        for layer in engine.layers:
            engine.check_layer(layer, batch)
        graph.replay(engine.step(ForwardMode.DECODE, (1, 1, 1)))


def test_graphs_of_several_sizes_share_their_buffers() -> None:
    engine = prefilled()
    graphs = [Graph(engine, ForwardMode.DECODE, requests=requests) for requests in (5, 3, 2)]
    for graph, lengths in zip((*graphs, *graphs), ((1, 1, 1), (1, 1, 1), (1, 0, 1)) * 2, strict=True):
        graph.replay(engine.step(ForwardMode.DECODE, lengths))


def test_a_table_that_is_read_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: a graph that reads SGLang's table itself meets what was written over it."""
    engine = prefilled()
    monkeypatch.setattr(engine.backend._arrays, "buffers", lambda *_: None)
    monkeypatch.setattr(engine.backend, "_graphs", SimpleNamespace(captured=False, requests=4, tokens=4))
    original = engine.backend._arrays.step
    monkeypatch.setattr(engine.backend._arrays, "step", lambda batch, lengths, _: original(batch, lengths))
    graph = Graph(engine, ForwardMode.DECODE, requests=3)
    with pytest.raises(AssertionError, match="layer 0, request 0"):
        graph.replay(engine.step(ForwardMode.DECODE, (1, 1, 1)))


def test_counts() -> None:
    engine = prefilled("page 16, windows and sinks")
    before = asdict(counters().snapshot())
    graph = Graph(engine, ForwardMode.DECODE)
    graph.replay(engine.step(ForwardMode.DECODE, (1, 0, 1)))
    after = asdict(counters().snapshot())
    made = {
        name: after[name] - before[name] for name in ("steps", "plans", "attention_calls", "replayed_calls")
    }
    # Three passes of the capture, of two layers each; the capture itself is one of them on a CPU.
    assert made == {"steps": 4, "plans": 4, "attention_calls": 6, "replayed_calls": 2}
    assert after["tokens"] - before["tokens"] == 2 * (3 * 4 + 2)


def test_where_reads_of_the_table_end() -> None:
    if not hasattr(base_attn_backend, "SharedReadEnds"):
        pytest.skip("0.5.17 takes them to end before a replay")
    ends, backend = base_attn_backend.SharedReadEnds, prefilled().backend
    assert backend.shared_read_ends(ForwardMode.DECODE) is ends.PRE_REPLAY
    assert backend.shared_read_ends(ForwardMode.TARGET_VERIFY) is ends.PRE_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is ends.UNKNOWN


def test_misuse_is_refused() -> None:
    engine = prefilled()
    view = SimpleNamespace(forward_mode=ForwardMode.DECODE)
    with pytest.raises(PlanError, match="expected init_cuda_graph_state"):
        engine.backend.init_forward_metadata_out_graph(view)
    Graph(engine, ForwardMode.DECODE, requests=3)
    engine.backend.init_cuda_graph_state(2, 2)
    with pytest.raises(PlanError, match=r"at most 3 requests and 3 tokens, .* got 9 and 3"):
        engine.backend.init_cuda_graph_state(9, 3)
    with pytest.raises(UnsupportedError, match="graphs of whole steps of the mode EXTEND"):
        engine.backend.init_forward_metadata_out_graph(SimpleNamespace(forward_mode=ForwardMode.EXTEND))


def test_output_of_a_broken_graph_is_written_in_place() -> None:
    engine = prefilled()
    batch = engine.step(ForwardMode.EXTEND, (2, 0, 9))
    engine.backend.init_forward_metadata(batch)
    shape = engine.shape
    q, k, v = (engine.normal(11, *size) for size in ((128,), (2, 32), (2, 32)))
    fitting = torch.empty(16, shape.heads * shape.head_dim_v)
    expected = engine.backend.forward(q, k, v, engine.layers[0], batch)
    batch._attn_output = fitting[:11]
    out = engine.backend.forward(q, k, v, engine.layers[0], batch)
    assert out.data_ptr() == fitting.data_ptr()
    assert torch.equal(out, expected)
    batch._attn_output = fitting[:12]
    assert engine.backend.forward(q, k, v, engine.layers[0], batch).data_ptr() != fitting.data_ptr()
