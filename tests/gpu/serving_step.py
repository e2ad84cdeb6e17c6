# SPDX-License-Identifier: Apache-2.0
"""What an engine keeps from step to step: tensors of the greatest size at fixed addresses, filled anew."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from gpu_device import device, starts_of
from numeric import assert_close, assert_lse_close
from oracle import attention
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec

REQUESTS, TOKENS, MAX_KV = 8, 160, 2000


@dataclass(frozen=True)
class Step:
    """Query and KV lengths of at most REQUESTS requests; seed: of everything random."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    def padded(self) -> tuple[Tensor, Tensor]:
        """qo_indptr and kv_lens on the host, empty requests behind the last one."""
        empty = (0,) * (REQUESTS - len(self.q_lens))
        return starts_of(self.q_lens + empty), torch.tensor(self.kv_lens + empty, dtype=torch.int32)


STEPS = {
    "decode": Step((1,) * 8, (5, 1999, 64, 700, 1, 65, 333, 1200), 1),
    "mixed": Step((1, 60, 1, 3, 70), (1500, 60, 900, 800, 400), 2),
    "prefill": Step((160,), (160,), 3),
    "idle": Step((), (), 4),
    "two chunks": Step((100, 60), (2000, 700), 5),
    "one token": Step((1,), (1,), 6),
    "uneven": Step((1, 1, 1), (2000, 3, 17), 7),
}
ORDER = ("decode", "mixed", "prefill", "idle", "two chunks", "decode", "one token", "uneven", "mixed")


class Serving:
    """Persistent tensors of one layer over pages that never move."""

    def __init__(self, spec: AttentionSpec, seed: int = 0) -> None:
        self.spec = spec
        random = torch.Generator().manual_seed(seed)
        pages = -(-MAX_KV // spec.page_size)
        order = torch.randperm(REQUESTS * pages + 2, generator=random).to(torch.int32)
        self.blocks_host = order[: REQUESTS * pages].view(REQUESTS, pages)
        shape = (REQUESTS * pages + 2, spec.page_size, spec.num_kv_heads)
        kv_dtype = getattr(torch, spec.kv_dtype)
        self.k_host = torch.randn(*shape, spec.head_dim, generator=random).to(kv_dtype)
        self.v_host = torch.randn(*shape, spec.head_dim_v, generator=random).to(kv_dtype)
        self.k, self.v = self.k_host.to(device()), self.v_host.to(device())
        dtype = getattr(torch, spec.dtype)
        self.q = torch.zeros(TOKENS, spec.num_qo_heads, spec.head_dim, dtype=dtype, device=device())
        self.out = torch.empty(TOKENS, spec.num_qo_heads, spec.head_dim_v, dtype=dtype, device=device())
        self.lse = torch.empty(TOKENS, spec.num_qo_heads, device=device())
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device())
        self.kv_lens = torch.zeros(REQUESTS, dtype=torch.int32, device=device())
        self.table = PageTable.from_block_table(
            self.blocks_host.to(device()), self.kv_lens, page_size=spec.page_size
        )
        self.sinks = torch.linspace(-2, 2, spec.num_qo_heads).to(device()) if spec.sinks else None

    def attention(self, num_ctas: int = 48, **options: Any) -> BatchAttention:
        return BatchAttention(
            self.spec, max_requests=REQUESTS, max_tokens=TOKENS, max_kv_len=MAX_KV, device=device(),
            num_ctas=num_ctas, **options,
        )  # fmt: skip

    def queries(self, step: Step) -> Tensor:
        random = torch.Generator().manual_seed(step.seed)
        shape = (step.tokens, self.spec.num_qo_heads, self.spec.head_dim)
        return torch.randn(*shape, generator=random).to(self.q.dtype)

    def fill(self, step: Step) -> None:
        """Bring the step's inputs to the device; outputs become NaN."""
        starts, kv_lens = step.padded()
        self.starts.copy_(starts)
        self.kv_lens.copy_(kv_lens)
        self.q[: step.tokens] = self.queries(step).to(device())
        self.q[step.tokens :] = math.nan
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    def plan(self, attn: BatchAttention, step: Step | None) -> None:
        """By the host for the lengths of `step`, or by the device for those that it finds."""
        if step is None:
            attn.plan(self.starts, self.table)
        else:
            starts, kv_lens = step.padded()
            attn.plan(self.starts, self.table, qo_indptr_host=starts, kv_lens_host=kv_lens)

    def run(self, attn: BatchAttention) -> None:
        attn.run(self.q, self.k, self.v, out=self.out, lse=self.lse, sinks=self.sinks)

    def results(self) -> tuple[Tensor, Tensor]:
        return self.out.to("cpu", copy=True), self.lse.to("cpu", copy=True)

    def gathered(self, request: int, kv_len: int) -> tuple[Tensor, Tensor]:
        """K and V of a request in order, on the host."""
        size = self.spec.page_size
        pages = self.blocks_host[request, : -(-kv_len // size)].long()
        bits = {1: torch.uint8, 2: torch.int16}[self.k_host.element_size()]
        k, v = (
            cache.view(bits)[pages].view(cache.dtype).flatten(0, 1)[:kv_len].float()
            for cache in (self.k_host, self.v_host)
        )
        return k, v

    def check(self, step: Step) -> None:
        """The results against the oracle; rows behind the batch must still be NaN."""
        out, lse = self.results()
        q, start = self.queries(step), 0
        for request, (q_len, kv_len) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
            k, v = self.gathered(request, kv_len)
            o, expected_lse = attention(
                q[start : start + q_len],
                k,
                torch.cat([v, v.abs()], dim=2),
                scale=self.spec.scale,
                causal=self.spec.causal,
                window_left=self.spec.window_left,
                sinks=None if self.sinks is None else self.sinks.cpu(),
            )
            dim = self.spec.head_dim_v
            assert_close("out", out[start : start + q_len], o[..., :dim], amplitude=o[..., dim:])
            assert_lse_close("lse", lse[start : start + q_len], expected_lse)
            start += q_len
        assert out[start:].isnan().all(), "rows behind the batch were written"
        assert lse[start:].isnan().all(), "rows behind the batch were written"
