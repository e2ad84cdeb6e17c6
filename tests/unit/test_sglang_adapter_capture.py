# SPDX-License-Identifier: Apache-2.0
"""Steps of SGLang that are saved when someone asks, eager and replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_graph import Graph
from sglang_step import ROWS, Engine

from fi_backend.cli.explain_model import explain_step
from fi_backend.core import counters as counters_module
from fi_backend.core.counters import Counters, ask_for_steps
from fi_backend.core.planner import CostModel
from fi_backend.core.step import Step, load_step

PROMPTS = (100, 60, 3)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counters:
    made = Counters(tmp_path)
    monkeypatch.setattr(counters_module, "_current", made)
    return made


def eager(engine: Engine, mode: ForwardMode, lengths: tuple[int, ...]) -> None:
    batch = engine.step(mode, lengths)
    engine.backend.init_forward_metadata(batch)
    for layer in engine.layers:
        engine.check_layer(layer, batch)


def saved(folder: Path) -> list[Step]:
    return [load_step(path) for path in sorted(folder.glob("*.json"))]


def pages_of(engine: Engine, requests: int) -> list[list[int]]:
    table, size = engine.runner.req_to_token_pool.req_to_token, engine.shape.page_size
    return [
        (table[row, :length:size] // size).tolist()
        for row, length in zip(ROWS[:requests], engine.lengths[:requests], strict=True)
    ]


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_eager_step(counts: Counters, tmp_path: Path, page_size: int) -> None:
    """Asked for before the first request: kinds of layers are not known by then."""
    engine = Engine(Shape(page_size=page_size, windows=(-1, 20)))
    ask_for_steps(tmp_path, 1)
    eager(engine, ForwardMode.EXTEND, PROMPTS)
    eager(engine, ForwardMode.DECODE, (1, 1, 1))
    steps = saved(tmp_path)
    assert [(step.kv_lens.tolist(), step.q_lens.tolist()) for step in steps] == [([*PROMPTS], [*PROMPTS])] * 2
    assert [step.window_left for step in steps] == [-1, 20]
    assert counts.snapshot().step_files == 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_replayed_step_without_its_padding(counts: Counters, tmp_path: Path, page_size: int) -> None:
    engine = Engine(Shape(page_size=page_size, windows=(-1,)))
    eager(engine, ForwardMode.EXTEND, PROMPTS)
    ask_for_steps(tmp_path, 2)
    graph = Graph(engine, ForwardMode.DECODE)
    assert saved(tmp_path) == [], "nothing of a capture"
    for number in (1, 2):
        batch = engine.step(ForwardMode.DECODE, (1, 1, 1))
        graph.replay(batch)
        step = saved(tmp_path)[-1]
        assert step.kv_lens.tolist() == [length + number for length in PROMPTS]
        assert step.block_table == pages_of(engine, 3)
    assert len(saved(tmp_path)) == 2
    assert (step.device, step.num_ctas) == ("cpu", engine.backend._layers._attention.popitem()[1].num_ctas)


def test_what_requests_share_is_drawn(counts: Counters, tmp_path: Path) -> None:
    engine = Engine(Shape(page_size=16, windows=(-1,)))
    eager(engine, ForwardMode.EXTEND, (100, 0, 0))
    engine.share(1, 0, 96)
    ask_for_steps(tmp_path, 1)
    eager(engine, ForwardMode.EXTEND, (1, 5, 0))
    [step] = saved(tmp_path)
    [root] = explain_step(step, num_ctas=1, costs=CostModel.for_device("cpu")).tree.roots
    assert (root.begin, root.end, root.requests) == (0, 96, [0, 1])
