# SPDX-License-Identifier: Apache-2.0
"""Timing by replays of captured graphs: all layers of a step in one graph, as engines run them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from fi_backend.benchmarks.peers import Run

_SPACER_SIDE = 4096
_BUDGET_US = 60_000.0
_MIN_REPLAYS, _MAX_REPLAYS = 3, 40
# Clocks follow the power drawn, so that a figure would begin at what the one before it has left of them.
_WARM_UP_US = 20_000.0


class Captured(Protocol):
    """A captured step. output: what its last layer returns, overwritten by every replay."""

    output: Tensor

    def replay(self) -> None:
        """Run the step once and wait for it."""

    def time_us(self) -> float:
        """Return the median of several replays in microseconds."""


class Clock(Protocol):
    """Captures steps; the measurement knows no more of a device than this."""

    def capture(self, run: Run, layers: int) -> Captured:
        """Capture `run` of every layer, each with the unrelated product behind it."""

    def capture_spacers(self, layers: int) -> Captured:
        """Capture the unrelated products alone."""


class Spacer:
    """A small product that stands behind every layer's attention: no attention call follows another.

    Vector times 4096 x 4096 bf16 matrix, a matrix for each layer: one matrix alone would be served from the
    L2 cache when the product is timed by itself, and from memory between the layers.
    """

    def __init__(self, layers: int, device: torch.device | str) -> None:
        shape = (layers, _SPACER_SIDE, _SPACER_SIDE)
        self._matrices = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self._vector = torch.randn(_SPACER_SIDE, dtype=torch.bfloat16, device=device)
        self.output = torch.empty_like(self._vector)

    def __call__(self, layer: int) -> None:
        """Launch the product of a layer."""
        torch.mv(self._matrices[layer], self._vector, out=self.output)


class GraphClock:
    """The clock of a CUDA device, for steps of up to `max_layers` layers; `budget_us`: time of a figure."""

    def __init__(self, device: torch.device, max_layers: int, budget_us: float = _BUDGET_US) -> None:
        self._device = device
        self._budget_us = budget_us
        self._spacer = Spacer(max_layers, device)

    def capture(self, run: Run, layers: int) -> CapturedGraph:
        """Warm up `run` and capture it; raises what it raises."""

        def step() -> Tensor:
            output = self._spacer.output
            for layer in range(layers):
                output = run(layer)
                self._spacer(layer)
            return output

        return CapturedGraph(self._device, step, self._budget_us)

    def capture_spacers(self, layers: int) -> CapturedGraph:
        """Capture the products of a step."""

        def step() -> Tensor:
            for layer in range(layers):
                self._spacer(layer)
            return self._spacer.output

        return CapturedGraph(self._device, step, self._budget_us)


class CapturedGraph:
    """A CUDA graph with its output."""

    def __init__(
        self, device: torch.device, step: Callable[[], Tensor], budget_us: float = _BUDGET_US
    ) -> None:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Compiles, allocates and raises here rather than inside the capture.
            step()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        self._device = device
        self._step = step  # keeps what the graph reads alive: plans, tables, workspaces
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.output = step()
        self.replay()
        one = self._median_us(1)
        self._replays = max(_MIN_REPLAYS, min(_MAX_REPLAYS, int(budget_us / one)))
        self._warm_up = max(1, min(_MAX_REPLAYS, int(_WARM_UP_US / one)))

    def replay(self) -> None:
        """Run the step once and wait for it."""
        self._graph.replay()
        torch.cuda.synchronize(self._device)

    def time_us(self) -> float:
        """Return the median of 3 to 40 replays, as the budget allows, after 20 ms that are not counted."""
        for _ in range(self._warm_up):
            self._graph.replay()
        return self._median_us(self._replays)

    def times_us(self, replays: int) -> list[float]:
        """Return the microseconds of so many replays, each started when the one before is through."""
        self.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1000)
        return times

    def _median_us(self, replays: int) -> float:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(replays)
        ]
        for begin, end in events:
            begin.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) * 1000
