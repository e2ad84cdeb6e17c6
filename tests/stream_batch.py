# SPDX-License-Identifier: Apache-2.0
"""Two requests of examples/streaming_llm on any device: both versions beside the definition."""

from __future__ import annotations

import example_modules
import torch
from numeric import assert_close
from oracle import attention
from torch import Tensor

from fi_backend import AttentionSpec

streaming = example_modules.load("streaming_llm/streaming")
HQ, HKV, PAGE = 4, 2, 4
SINKS, WINDOW = 1, 3  # pages
THETA = 500.0


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """By definition, in float64: elements d and d + dim / 2 turn by position * THETA ** (-2 d / dim)."""
    dim = x.shape[-1]
    angle = positions[:, None, None].double() * THETA ** -(torch.arange(dim // 2).double() * 2 / dim)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def kept(count: int) -> list[int]:
    """Which of `count` tokens are there: all until the pages are full, then whole pages of the oldest go."""
    sinks, tokens = SINKS * PAGE, list(range(count))
    while len(tokens) > (SINKS + WINDOW) * PAGE:
        tokens = tokens[:sinks] + tokens[sinks + PAGE :]
    return tokens


class StreamBatch:
    """Two requests, step by step, in both versions and by definition."""

    def __init__(self, dtype: str, *, head_dim: int = 32, device: str = "cpu") -> None:
        self.random = torch.Generator().manual_seed(0)
        self.dtype = getattr(torch, dtype)
        self.head_dim, self.device = head_dim, device
        spec = AttentionSpec(HQ, HKV, head_dim, dtype=dtype, page_size=PAGE)
        self.pages = streaming.RollingPages(
            2, page_size=PAGE, sink_pages=SINKS, window_pages=WINDOW, device=device
        )
        options = {"max_tokens": 20, "theta": THETA}
        self.layers = [
            streaming.FusedStreaming(spec, self.pages, **options),
            streaming.UnfusedStreaming(spec, self.pages, **options),
        ]
        self.keys: list[list[Tensor]] = [[], []]
        self.values: list[list[Tensor]] = [[], []]

    def normal(self, tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, self.head_dim, generator=self.random).to(self.dtype)

    def step(self, counts: tuple[int, int]) -> None:
        k, v, q = (self.normal(sum(counts), heads) for heads in (HKV, HKV, HQ))
        slots = self.pages.append(counts)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        for r, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            self.keys[r] += k[begin:end]
            self.values[r] += v[begin:end]
        outs = []
        for layer in self.layers:
            layer.append(k.to(self.device), v.to(self.device), slots)
            layer.plan(starts.to(self.device))
            outs.append(layer.run(q.to(self.device)).cpu())
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
