# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of `bench kernels --device cuda` on a CPU: a counting clock, peers with given answers, a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fi_backend.benchmarks.cuda import cases as workloads
from fi_backend.benchmarks.cuda.cases import Case
from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.peers import Peer, Problem, Run, SharedPrefix
from fi_backend.benchmarks.workloads import Workload
from fi_backend.cli import bench_cuda
from fi_backend.core.spec import AttentionSpec

SPEC = AttentionSpec(4, 2, 64, dtype="bfloat16", page_size=16)
PREFIXED = Workload(
    "prefixed", (1, 1, 1, 3), (70, 80, 49, 64), (SharedPrefix(32, 0, 2), SharedPrefix(48, 2, 4))
)
SHARED = Workload("shared", (1,) * 8, (512 + 16,) * 8, (SharedPrefix(512, 0, 8),))
CEILINGS = {"read_gbs": 10.0, "copy_gbs": 12.0, "matmul_tflops": 0.5}


class Ticks:
    """Microseconds of a pretended device: every layer's call takes 100, and the product behind it 2000."""

    now = 0.0


class EagerStep:
    """Stands for a captured graph: a replay runs the layers."""

    def __init__(self, run: Run, layers: int) -> None:
        self._run, self._layers = run, layers
        self.output = run(layers - 1)

    def replay(self) -> None:
        for layer in range(self._layers):
            self._run(layer)

    def time_us(self) -> float:
        begin = Ticks.now
        self.replay()
        return Ticks.now - begin


class EagerClock:
    """Runs on the CPU at once."""

    def capture(self, run: Run, layers: int) -> EagerStep:
        def with_product(layer: int) -> torch.Tensor:
            Ticks.now += 100 + 2000
            return run(layer)

        return EagerStep(with_product, layers)

    def capture_spacers(self, layers: int) -> EagerStep:
        def product(_: int) -> torch.Tensor:
            Ticks.now += 2000
            return torch.empty(0)

        return EagerStep(product, layers)


class Fixed(Peer):
    """Writes a given answer and takes so many microseconds more."""

    def __init__(
        self, name: str, answer: Callable[[Problem], torch.Tensor], us: float = 0, mark: str = ""
    ) -> None:
        self.name, self.mark = name, mark  # type: ignore[misc]
        self.answer, self.us = answer, us

    def unavailable(self) -> str | None:
        return None

    def wait(self) -> None:
        Ticks.now += self.us

    def prepare(self, problem: Problem) -> Run:
        answers = [self.answer(replace(problem, layers=[layer])) for layer in problem.layers]
        out = torch.empty_like(problem.q)

        def run(layer: int) -> torch.Tensor:
            self.wait()
            return out.copy_(answers[layer])

        return run


def exact(problem: Problem) -> torch.Tensor:
    return exact_attention(problem, 0)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command run on the CPU with two small cases and one peer."""
    small = Case(replace(PREFIXED, prefixes=(), name="small"), SPEC, ("ragged", "page1"))
    shared = Case(SHARED, SPEC)
    properties = type("Properties", (), {"L2_cache_size": 1 << 10})

    class Registered:
        def peers(self, device: str) -> list[Peer]:
            missing = Fixed("absent", exact)
            missing.unavailable = lambda: "it is not installed [/lib]"  # type: ignore[method-assign]
            return [Fixed("exact", exact), missing]

    monkeypatch.setattr(workloads, "cases", lambda: [small, shared])
    monkeypatch.setattr("fi_backend.hooks.plugins", Registered)
    monkeypatch.setattr("fi_backend.benchmarks.cuda.ceilings.cuda_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr("fi_backend.benchmarks.cuda.graphs.GraphClock", lambda *_: EagerClock())
    monkeypatch.setattr(
        "fi_backend.benchmarks.record.gpu_provenance",
        lambda _: {"date": "d", "gpu": "none", "driver": "1", "versions": {}, "command": "c"},
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench_cuda, "torch_device", lambda: torch.device("cpu"))
