# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernels/sparse_cost.py: both sides read the same keys, and on a GPU no layer twice in a row."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_peers import EagerClock, Ticks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "kernels" / "sparse_cost.py"
    spec = importlib.util.spec_from_file_location("sparse_cost", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_layers_pass_more_than_twice_the_cache(script: ModuleType) -> None:
    assert script.layers_of(1 << 20, 0) == 1
    cache = 4 << 20
    case = script.windows(1, CPU, cache)
    read = script.WINDOW * 8 * 128 * 2 * 2
    assert (case.layers - 1) * read > 2 * cache
    outputs = [case.sparse(layer).clone() for layer in range(case.layers)]
    assert all(not torch.equal(outputs[0], other) for other in outputs[1:])
    for layer, output in enumerate(outputs):
        # The window's keys are all keys of the short context.
        torch.testing.assert_close(output, case.plain(layer), atol=1e-2, rtol=1e-2)
    blocks = script.blocks(128, 640, 1, CPU, 1 << 18)
    assert (blocks.layers - 1) * 640 * 2 * 128 * 2 * 2 > 2 << 18
    assert not torch.equal(blocks.sparse(0).clone(), blocks.sparse(1))


def test_a_figure_is_that_of_one_layer_without_the_product(script: ModuleType) -> None:
    seen: list[int] = []

    def sparse(layer: int) -> torch.Tensor:
        seen.append(layer)
        return torch.zeros(1)

    def plain(_: int) -> torch.Tensor:
        Ticks.now += 300
        return torch.zeros(1)

    found = script.compare(script.Case(sparse, plain, 5), EagerClock(), 3)
    assert found == {"sparse_us": 100, "plain_us": 400, "ratio": pytest.approx(0.25), "bound": 0.25}
    assert seen[-5:] == [0, 1, 2, 3, 4]


def test_on_a_cpu_one_layer_is_timed(script: ModuleType) -> None:
    case = script.Case(lambda layer: torch.full((1,), layer), lambda layer: torch.full((1,), layer), 1)
    found = script.compare(case, None, 2)
    assert set(found) == {"sparse_us", "plain_us", "ratio", "bound"}


@pytest.mark.parametrize(("bound", "over"), [(0.149, ""), (0.151, "blocks 1024 x 4096, one mask; blocks")])
def test_what_is_over_its_limit_is_recorded_and_fails(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bound: float, over: str
) -> None:
    figures = {"sparse_us": 1.0, "plain_us": 9.0, "ratio": 0.1, "bound": bound}
    case = script.Case(torch.zeros, torch.zeros, 1)
    for name, value in (("windows", case), ("blocks", case), ("compare", figures)):
        monkeypatch.setattr(script, name, lambda *_, value=value: value)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["sparse_cost.py", "--json", str(tmp_path / "record.json")])
    try:
        with pytest.raises(SystemExit, match=over) if over else nullcontext():
            script.main()
    finally:
        torch.set_num_threads(threads)
    assert len(json.loads((tmp_path / "record.json").read_text())["rows"]) == 4
