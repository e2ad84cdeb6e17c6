# SPDX-License-Identifier: Apache-2.0
"""The StreamingLLM example: which tokens are kept, and keys rotated by their places among these."""

from __future__ import annotations

import json
import math
from pathlib import Path

import example_modules
import pytest
import torch
from numeric import assert_close
from oracle import attention
from torch import Tensor

from fi_backend import AttentionSpec

streaming = example_modules.load("streaming_llm/streaming")
HQ, HKV, DIM, PAGE = 4, 2, 32, 4
SINKS, WINDOW = 1, 3  # pages
THETA = 500.0


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """By definition, in float64: element d and d + DIM / 2 turn by position * THETA ** (-2 d / DIM)."""
    angle = positions[:, None, None].double() * THETA ** -(torch.arange(DIM // 2).double() * 2 / DIM)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def kept(count: int) -> list[int]:
    """Which of `count` tokens are there: all until the pages are full, then whole pages of the oldest go."""
    sinks, tokens = SINKS * PAGE, list(range(count))
    while len(tokens) > (SINKS + WINDOW) * PAGE:
        tokens = tokens[:sinks] + tokens[sinks + PAGE :]
    return tokens


class Stream:
    """Two requests, step by step, in both versions and by definition."""

    def __init__(self, dtype: str) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.dtype = getattr(torch, dtype)
        spec = AttentionSpec(HQ, HKV, DIM, dtype=dtype, page_size=PAGE)
        self.pages = streaming.RollingPages(2, page_size=PAGE, sink_pages=SINKS, window_pages=WINDOW)
        options = {"max_tokens": 20, "theta": THETA}
        self.layers = [
            streaming.FusedStreaming(spec, self.pages, **options),
            streaming.UnfusedStreaming(spec, self.pages, **options),
        ]
        self.keys: list[list[Tensor]] = [[], []]
        self.values: list[list[Tensor]] = [[], []]

    def normal(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, DIM, generator=self.random).to(self.dtype)

    def step(self, counts: tuple[int, int]) -> None:
        k, v, q = (self.normal(sum(counts), heads) for heads in (HKV, HKV, HQ))
        slots = self.pages.append(counts)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        for r, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            self.keys[r] += k[begin:end]
            self.values[r] += v[begin:end]
        outs = []
        for layer in self.layers:
            layer.append(k, v, slots)
            layer.plan(starts)
            outs.append(layer.run(q))
        for r, count in enumerate(counts):
            at = kept(len(self.keys[r]))
            assert int(self.pages.kv_lens[r]) == len(at)
            keys, values = (torch.stack([x[r][i] for i in at]) for x in (self.keys, self.values))
            rows = slice(int(starts[r]), int(starts[r + 1]))
            turned = (
                rotated(q[rows], torch.arange(len(at) - count, len(at))),
                rotated(keys, torch.arange(len(at))),
            )
            o, _ = attention(*turned, values)
            amplitude, _ = attention(*turned, values.abs())
            # The unfused version rounds rotated keys and queries to the dtype of the cache.
            for name, out, slack in zip(("fused", "unfused"), outs, (2.0, 3.0), strict=True):
                assert_close(f"{name}, request {r}", out[rows], o, amplitude=amplitude, slack=slack)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_versions_step_by_step(dtype: str) -> None:
    """Prompts of different lengths, chunks, then tokens one by one until every page has been taken again."""
    stream = Stream(dtype)
    for counts in ((13, 2), (5, 9), *[(1, 1)] * 30, (0, 3), (6, 0)):
        stream.step(counts)
    assert len(stream.keys[0]) > 3 * stream.pages.capacity


def test_pages_roll_and_sinks_stay() -> None:
    pages = streaming.RollingPages(1, page_size=PAGE, sink_pages=SINKS, window_pages=WINDOW)
    first = pages.append([16])
    assert first.tolist() == list(range(16))
    assert pages.append([1]).tolist() == [4]  # the oldest page of the window is taken again
    assert pages.table.tolist() == [[0, 2, 3, 1]]
    assert pages.kv_lens.tolist() == [13]
    pages.append([8])
    assert pages.table.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"^counts\[0\]: expected at most 9 tokens at once; got 10"):
        pages.append([10])
    with pytest.raises(ValueError, match=r"^counts: expected 1 requests; got 2"):
        pages.append([1, 1])
    with pytest.raises(ValueError, match=r"^window_pages: expected 1 or more; got 0"):
        streaming.RollingPages(1, page_size=PAGE, sink_pages=SINKS, window_pages=0)


def test_the_measurement_runs(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    example_modules.run(
        "streaming_llm/measure",
        *("--lengths", "64", "--runs", "2", "--heads", "4", "2", "--head-dim", "32", "--dtype", "float32"),
        *("--eager", "--json", str(record)),
    )
    [row] = json.loads(record.read_text())["rows"]
    assert row["length"] == 64
    assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("fused_us", "unfused_us", "ratio"))
    assert row["error"] < 1e-4
