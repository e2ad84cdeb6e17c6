# SPDX-License-Identifier: Apache-2.0
"""A random batch as an engine would hold it, run through BatchAttention and compared with the oracle.

The batch is made on the host, runs on the device that it names, and its results come back to the host.

Everything that a kernel must not read is poison: NaN in the tails of pages, in unused pages, in pages left of
every window (whose ids are -1), in padding between strides and in rows beyond the batch; garbage ids behind
the end of table rows; garbage bytes in the workspace. What it must not write is compared afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from batch import Batch
from engine_memory import POISON_BYTE, choose_pages, kv_caches, move, page_table, poison
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from oracle import attention
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.planner import CostModel
from fi_backend.core.prefix_forest import PrefixForest, shareable
from fi_backend.core.support import query_tiles

SPLIT_COSTS = CostModel(
    granule=16,
    min_chunk=16,
    alpha=1,
    beta=(1, 1, 1, 1, 1),
    part_cost=1,
    invariant_grid=64,
    share_cost=0,
)
GUARD_BYTES = 256
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Change torch's threads, which the kernels use too. One is quickest for the small tensors of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def scale_argument(value: float | tuple[float, ...], device: str = "cpu") -> Any:
    return torch.tensor(value, dtype=torch.float32, device=device) if isinstance(value, tuple) else value


class EngineState:
    """The tensors of a batch: clean K and V for the oracle, poisoned memory for the kernel."""

    def __init__(self, batch: Batch) -> None:
        spec = batch.spec
        self.batch = batch
        self.random = torch.Generator().manual_seed(batch.seed)
        dtype, kv_dtype = getattr(torch, spec.dtype), getattr(torch, spec.kv_dtype)
        tokens = sum(batch.q_lens)
        self.q = (self._normal(tokens, spec.num_qo_heads, spec.head_dim) * batch.gain).to(dtype)
        self.k = [self._normal(n, spec.num_kv_heads, spec.head_dim).to(kv_dtype) for n in batch.kv_lens]
        self.v = [self._values(n).to(kv_dtype) for n in batch.kv_lens]
        for request, (source, pages) in enumerate(batch.shares):
            for tokens in (self.k, self.v):
                tokens[request][: pages * spec.page_size] = tokens[source][: pages * spec.page_size]
        self.slopes = torch.rand(spec.num_qo_heads, generator=self.random) * 0.1 if spec.alibi else None
        self.sinks = self._normal(spec.num_qo_heads) * 2 if spec.sinks else None
        self.masks = None
        if spec.custom_mask:
            self.masks = [
                torch.rand(q, k, generator=self.random) < 0.7
                for q, k in zip(batch.q_lens, batch.kv_lens, strict=True)
            ]
        self._place()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def _values(self, count: int) -> Tensor:
        """Some tokens, the first and the last among them, are so large that losing one shows in any dtype."""
        values = self._normal(count, self.batch.spec.num_kv_heads, self.batch.spec.head_dim_v)
        if count:
            bright = torch.randint(count, (2 + count // 100,), generator=self.random)
            values[torch.cat([bright, torch.tensor([0, count - 1])])] *= 16
        return values

    def _place(self) -> None:
        spec, layout, lens = self.batch.spec, self.batch.layout, self.batch.kv_lens
        page_size = 1 if layout.table == "ragged" else spec.page_size
        self.pages, num_pages = choose_pages(layout, lens, page_size, self.random)
        for request, (source, count) in enumerate(self.batch.shares):
            self.pages[request][:count] = self.pages[source][:count]
        kv_dtype = getattr(torch, spec.kv_dtype)
        sizes = (num_pages, page_size, spec.num_kv_heads, spec.head_dim, spec.head_dim_v)
        self.k_cache, self.v_cache = kv_caches(layout, kv_dtype, *sizes)
        for request, pages in enumerate(self.pages):
            first = self._first_visible(request)
            at = torch.arange(first, lens[request])
            place = torch.tensor(pages, dtype=torch.int64)[at // page_size], at % page_size
            for cache, tokens in ((self.k_cache, self.k[request]), (self.v_cache, self.v[request])):
                bits = _BITS[cache.element_size()]  # fp8 has no indexed assignment
                cache.view(bits)[place] = tokens[first:].view(bits)
            pages[: first // page_size] = [-1] * (first // page_size)
        self.kv_lens = torch.tensor(lens, dtype=torch.int32, device=self.batch.device)
        self.table = page_table(layout.table, self.pages, self.kv_lens, page_size, self.random)
        self.k_cache, self.v_cache = move(self.batch.device, self.k_cache, self.v_cache)
        if layout.table == "ragged":
            self.k_cache, self.v_cache = self.k_cache[:, 0], self.v_cache[:, 0]
        if layout.raw_fp8 and spec.kv_dtype.startswith("float8"):
            self.k_cache, self.v_cache = self.k_cache.view(torch.uint8), self.v_cache.view(torch.uint8)

    def _first_visible(self, request: int) -> int:
        """Keys below are left of every row's window."""
        batch, window = self.batch, self.batch.spec.window_left
        q_len, kv_len = batch.q_lens[request], batch.kv_lens[request]
        if window < 0 or batch.layout.table == "ragged" or q_len == 0:
            return 0
        return min(kv_len, max(0, kv_len - q_len - window))

    def _there(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(self.batch.device)

    def expected(self, device: str = "") -> tuple[Tensor, Tensor, Tensor]:
        """(o, lse, amplitude) of the oracle on the host, amplitude being sum(p * |v|).

        device: where the oracle computes, the batch's by default.
        """
        spec, batch = self.batch.spec, self.batch
        device = device or batch.device
        results = []
        start = 0
        for r, q_len in enumerate(batch.q_lens):
            with torch.device(device):
                values = self.v[r].to(device).float()
                o, lse = attention(
                    self.q[start : start + q_len].to(device),
                    self.k[r].to(device).float(),
                    torch.cat([values, values.abs()], dim=2),
                    scale=spec.scale,
                    causal=spec.causal,
                    window_left=spec.window_left,
                    soft_cap=spec.logits_soft_cap,
                    slopes=None if self.slopes is None else self.slopes.to(device),
                    sinks=None if self.sinks is None else self.sinks.to(device),
                    mask=None if self.masks is None else self.masks[r].to(device),
                    k_scale=scale_argument(batch.k_scale, device),
                    v_scale=scale_argument(batch.v_scale, device),
                )
            o, lse = o.cpu(), lse.cpu()
            results.append((o[..., : spec.head_dim_v], lse, o[..., spec.head_dim_v :]))
            start += q_len
        if not results:
            none = torch.zeros(0, spec.num_qo_heads, spec.head_dim_v, dtype=torch.float64)
            return none, none[..., 0], none
        o, lse, amplitude = (torch.cat(parts) for parts in zip(*results, strict=True))
        return o, lse, amplitude

    def queries(self) -> Tensor:
        """q with the rows before and behind the batch poisoned, perhaps as a slice of packed QKV."""
        spec, layout = self.batch.spec, self.batch.layout
        rows = layout.first_token + self.q.shape[0] + layout.extra_tokens
        heads = spec.num_qo_heads + (2 * spec.num_kv_heads if layout.q == "qkv" else 0)
        memory = poison(self.q.dtype, rows, heads, spec.head_dim)
        q = memory[:, : spec.num_qo_heads]
        q[layout.first_token : layout.first_token + self.q.shape[0]] = self.q
        return move(self.batch.device, q)[0]

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Poisoned out and lse."""
        spec, layout = self.batch.spec, self.batch.layout
        rows = layout.first_token + self.q.shape[0] + layout.extra_tokens
        pad = 1 if layout.out == "heads" else 0
        out = poison(self.q.dtype, rows, spec.num_qo_heads + pad, spec.head_dim_v)
        lse = poison(torch.float32, rows, spec.num_qo_heads + pad)
        out, lse = move(self.batch.device, out, lse)
        self.gaps = out[:, :pad], lse[:, :pad]
        return out[:, pad:], lse[:, pad:]

    def forest(self) -> PrefixForest:
        """What the requests share, from their pages."""
        spec, batch = self.batch.spec, self.batch
        table = torch.zeros(len(self.pages), max(map(len, self.pages), default=0), dtype=torch.int32)
        for row, pages in zip(table, self.pages, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
        q_lens, kv_lens = (torch.tensor(n, dtype=torch.int32) for n in (batch.q_lens, batch.kv_lens))
        tile = query_tiles(spec, batch.device)[1]
        share = shareable(q_lens, kv_lens, spec.page_size, spec.group_size, tile)
        return PrefixForest.from_block_table(table, share, spec.page_size)

    def attention(self) -> BatchAttention:
        """A planned BatchAttention over a workspace of garbage."""
        batch = self.batch
        slack = batch.bound_slack or (0,) * len(batch.kv_lens)
        bounds = [n + s for n, s in zip(batch.kv_lens, slack, strict=True)]
        limits = {
            "max_requests": max(1, len(batch.q_lens)),
            "max_tokens": max(1, sum(batch.q_lens)),
            "max_kv_len": max([1, *bounds]),
        }
        options: dict[str, Any] = {
            "num_ctas": batch.num_ctas,
            "planned_queues": batch.planned_queues,
            "longest_first": batch.longest_first,
            "costs": batch.costs,
            "device": batch.device,
            "sharing": batch.sharing,
        }
        size = BatchAttention(batch.spec, **limits, **options).workspace_size()
        memory = torch.full((size + GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8)
        [self.workspace] = move(batch.device, memory)
        attn = BatchAttention(batch.spec, **limits, **options, workspace=self.workspace[:size])
        self.starts = torch.tensor([batch.layout.first_token, *batch.q_lens]).cumsum(0).to(torch.int32)
        kwargs: dict[str, Any] = {"custom_mask": self.masks} if self.masks is not None else {}
        if batch.bound_slack or (batch.device != "cpu" and batch.host_lengths):
            kwargs["qo_indptr_host"] = self.starts
            kwargs["kv_lens_host"] = torch.tensor(bounds, dtype=torch.int32)
        if batch.sharing is not None:
            kwargs["forest"] = self.forest()
        self.plan = attn.plan(self.starts.to(batch.device), self.table, **kwargs)
        return attn

    def run(self, attn: BatchAttention, *, threads: int = 2) -> tuple[Tensor, Tensor]:
        """out and lse of all rows, poison included, on the host."""
        q, (out, lse) = self.queries(), self.outputs()
        device = self.batch.device
        with torch_threads(threads):
            result = attn.run(
                q,
                self.k_cache,
                self.v_cache,
                out=out,
                lse=lse,
                k_scale=scale_argument(self.batch.k_scale, device),
                v_scale=scale_argument(self.batch.v_scale, device),
                alibi_slopes=self._there(self.slopes),
                sinks=self._there(self.sinks),
            )
        assert result is out
        return out.cpu(), lse.cpu()

    def inside(self, rows: Tensor) -> Tensor:
        """The rows of the batch, without the padding rows."""
        first = self.batch.layout.first_token
        return rows[first : first + self.q.shape[0]]


def counters(attn: BatchAttention) -> Tensor:
    """Ticket, faults and arrivals as the last launch left them: int32 on the host."""
    begin = attn.planner.layout.counters
    count = attn.planner.capacity[-1]
    return attn._plan_buffer.tensor[begin : begin + 4 * count].cpu().view(torch.int32)


def logit_size(batch: Batch) -> float:
    """Standard deviation of the logits, at least 1: float32 rounds large logits in proportion."""
    k_scale = max(batch.k_scale) if isinstance(batch.k_scale, tuple) else batch.k_scale
    return max(1.0, batch.gain * k_scale * abs(batch.spec.scale) * math.sqrt(batch.spec.head_dim))


def check(batch: Batch, *, oracle_device: str = "") -> EngineState:
    """Run `batch` with two numbers of threads and compare values, padding, workspace guard and bits."""
    with torch_threads(1):
        state = EngineState(batch)
        attn = state.attention()
        out, lse = state.run(attn, threads=2)
        o, expected_lse, amplitude = state.expected(oracle_device)
        slack = logit_size(batch)
        assert_lse_close("lse", state.inside(lse), expected_lse, slack=slack)
        assert_close("out", state.inside(out), o, amplitude=amplitude, slack=slack)
        first, last = batch.layout.first_token, batch.layout.first_token + sum(batch.q_lens)
        for name, rows in (("out", out), ("lse", lse)):
            assert rows[:first].isnan().all(), f"{name}: rows before the batch were written"
            assert rows[last:].isnan().all(), f"{name}: rows behind the batch were written"
        assert all(gap.isnan().all() for gap in state.gaps), "memory between the heads was written"
        assert (state.workspace[-GUARD_BYTES:] == POISON_BYTE).all(), "written behind workspace_size()"
        again, lse_again = state.run(attn, threads=3)
        assert_bitwise_equal("out of a second run", again, out)
        assert_bitwise_equal("lse of a second run", lse_again, lse)
        assert not counters(attn).any(), "a launch left faults, or counters that it must reset"
    return state
