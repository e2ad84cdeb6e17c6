# SPDX-License-Identifier: Apache-2.0
"""What an engine with a prefix cache keeps from step to step: requests whose leading pages are the same.

Tensors have the size of the greatest step and fixed addresses. Whatever must not be read is NaN: tails of
pages, pages that no request has, queries behind the batch, scratch memory; rows of the block table end in
garbage ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attention_batch import GUARD_BYTES, scale_argument, torch_threads
from engine_memory import GARBAGE_IDS, POISON_BYTE, poison
from gpu_device import device, starts_of
from numeric import assert_close, assert_lse_close
from oracle import attention
from plan_cases import COSTS, PlanCase
from shared_cases import ROOMY, Branch, SharedCase
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import query_tiles

_BITS = {1: torch.uint8, 2: torch.int16}


def shared_case(
    spec: AttentionSpec,
    paths: Sequence[Branch],
    run_tokens: dict[Branch, int],
    q_lens: Sequence[int],
    own: Sequence[int],
) -> SharedCase:
    """Requests of a tree; run_tokens: KV tokens of a branch, cut to pages; own: tokens behind branches."""
    pages = {run: max(1, n // spec.page_size) for run, n in run_tokens.items()}
    group = spec.num_qo_heads // spec.num_kv_heads
    return SharedCase(
        paths=tuple(paths),
        run_pages=pages,
        q_lens=tuple(q_lens),
        own=tuple(max(q, n) for q, n in zip(q_lens, own, strict=True)),
        page_size=spec.page_size,
        step=PlanCase((), (), group=group, tiles=query_tiles(spec, device())),
    )


class SharedServing:
    """One layer, and the cases that it will meet."""

    def __init__(
        self,
        spec: AttentionSpec,
        cases: Sequence[SharedCase],
        *,
        k_scale: Any = 1.0,
        v_scale: Any = 1.0,
        seed: int = 0,
    ) -> None:
        self.spec, self.scales = spec, (k_scale, v_scale)
        self.requests = max(len(case.q_lens) for case in cases)
        self.tokens = max(1, *(sum(case.q_lens) for case in cases))
        self.max_kv = max(max(case.kv_lens) for case in cases)
        width = max(len(row) for case in cases for row in case.rows()) + 2
        pages = 1 + max(page for case in cases for row in case.rows() for page in row)
        random = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(pages + 3, generator=random)
        dtype, kv_dtype = getattr(torch, spec.dtype), getattr(torch, spec.kv_dtype)
        shape = (pages + 3, spec.page_size, spec.num_kv_heads)
        self.k_pool = torch.randn(*shape, spec.head_dim, generator=random).to(kv_dtype)
        self.v_pool = torch.randn(*shape, spec.head_dim_v, generator=random).to(kv_dtype)
        there = device()
        self.k, self.v = torch.empty_like(self.k_pool).to(there), torch.empty_like(self.v_pool).to(there)
        self.q = torch.empty(self.tokens, spec.num_qo_heads, spec.head_dim, dtype=dtype, device=there)
        self.out = torch.empty(self.tokens, spec.num_qo_heads, spec.head_dim_v, dtype=dtype, device=there)
        self.lse = torch.empty(self.tokens, spec.num_qo_heads, device=there)
        self.starts = torch.zeros(self.requests + 1, dtype=torch.int32, device=there)
        self.kv_lens = torch.zeros(self.requests, dtype=torch.int32, device=there)
        self.blocks = torch.zeros(self.requests, width, dtype=torch.int32, device=there)
        self.table = PageTable.from_block_table(self.blocks, self.kv_lens, page_size=spec.page_size)
        self.sinks = torch.linspace(-2, 2, spec.num_qo_heads).to(there) if spec.sinks else None

    def attention(self, *, num_ctas: int = 24, **options: Any) -> BatchAttention:
        """A BatchAttention over scratch memory of NaN, with room for prefix nodes."""
        options = {
            "max_requests": self.requests, "max_tokens": self.tokens, "max_kv_len": self.max_kv,
            "num_ctas": num_ctas, "device": device(), "sharing": ROOMY, "costs": COSTS["eager"],
        } | options  # fmt: skip
        size = BatchAttention(self.spec, **options).workspace_size()
        self.workspace = torch.full((size + GUARD_BYTES,), POISON_BYTE, dtype=torch.uint8, device=device())
        return BatchAttention(self.spec, **options, workspace=self.workspace[:size])

    def lengths(self, case: SharedCase) -> tuple[Tensor, Tensor]:
        """qo_indptr and kv_lens on the host, empty requests behind the last one."""
        empty = (0,) * (self.requests - len(case.q_lens))
        return starts_of(case.q_lens + empty), torch.tensor(case.kv_lens + empty, dtype=torch.int32)

    def queries(self, case: SharedCase) -> Tensor:
        random = torch.Generator().manual_seed(sum(case.kv_lens))
        shape = (sum(case.q_lens), self.spec.num_qo_heads, self.spec.head_dim)
        return torch.randn(*shape, generator=random).to(self.q.dtype)

    def fill(self, case: SharedCase) -> None:
        """Bring a case's inputs to the device; outputs become NaN."""
        with torch_threads(1):
            self._fill(case)

    def _fill(self, case: SharedCase) -> None:
        size = self.spec.page_size
        blocks = torch.tensor(GARBAGE_IDS, dtype=torch.int32).repeat(self.blocks.numel())
        blocks = blocks[: self.blocks.numel()].view(self.blocks.shape)
        used = torch.zeros(self.k_pool.shape[:2], dtype=torch.bool)
        for row, pages, kv_len in zip(blocks, case.rows(), case.kv_lens, strict=False):
            ids = self.order[torch.tensor(pages, dtype=torch.int64)]
            row[: len(pages)] = ids.to(torch.int32)
            at = torch.arange(kv_len)
            used[ids[at // size], at % size] = True
        for cache, pool in ((self.k, self.k_pool), (self.v, self.v_pool)):
            bits = _BITS[pool.element_size()]
            memory = poison(pool.dtype, *pool.shape)
            memory.view(bits)[used] = pool.view(bits)[used]
            cache.view(bits).copy_(memory.view(bits))
        starts, kv_lens = self.lengths(case)
        self.starts.copy_(starts)
        self.kv_lens.copy_(kv_lens)
        self.blocks.copy_(blocks)
        q = self.queries(case)
        self.q[: q.shape[0]] = q.to(device())
        self.q[q.shape[0] :] = math.nan
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    def plan(self, attn: BatchAttention, case: SharedCase, *, share: bool = True) -> Plan:
        """By the host; share: with the prefixes that the case's block table has."""
        starts, kv_lens = self.lengths(case)
        forest = case.forest() if share else None
        plan = attn.plan(self.starts, self.table, qo_indptr_host=starts, kv_lens_host=kv_lens, forest=forest)
        assert plan is not None
        return plan

    def run(self, attn: BatchAttention) -> None:
        k_scale, v_scale = (scale_argument(scale, device()) for scale in self.scales)
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        attn.run(self.q, self.k, self.v, out=self.out, lse=self.lse, sinks=self.sinks, **scales)

    def results(self) -> tuple[Tensor, Tensor]:
        return self.out.to("cpu", copy=True), self.lse.to("cpu", copy=True)

    def step(self, attn: BatchAttention, case: SharedCase, *, share: bool = True) -> tuple[Tensor, Tensor]:
        """fill(), plan(), run(): out and lse on the host."""
        self.fill(case)
        self.plan(attn, case, share=share)
        self.run(attn)
        return self.results()

    def expected(self, case: SharedCase, there: str = "") -> tuple[Tensor, Tensor, Tensor]:
        """(o, lse, amplitude) of the oracle in float64 on the host, amplitude being sum(p * |v|).

        there: where the oracle computes, by default the device under test.
        """
        spec, q, start = self.spec, self.queries(case), 0
        there = there or device()
        parts = []
        for pages, q_len, kv_len in zip(case.rows(), case.q_lens, case.kv_lens, strict=True):
            ids = self.order[torch.tensor(pages, dtype=torch.int64)]
            k, v = (
                pool.view(_BITS[pool.element_size()])[ids].view(pool.dtype).flatten(0, 1)[:kv_len].float()
                for pool in (self.k_pool, self.v_pool)
            )
            with torch_threads(1), torch.device(there):
                o, lse = attention(
                    q[start : start + q_len].to(there),
                    k.to(there),
                    torch.cat([v, v.abs()], dim=2).to(there),
                    scale=spec.scale,
                    causal=spec.causal,
                    soft_cap=spec.logits_soft_cap,
                    sinks=None if self.sinks is None else self.sinks.to(there),
                    k_scale=scale_argument(self.scales[0], there),
                    v_scale=scale_argument(self.scales[1], there),
                )
            parts.append((o[..., : spec.head_dim_v].cpu(), lse.cpu(), o[..., spec.head_dim_v :].cpu()))
            start += q_len
        o, lse, amplitude = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return o, lse, amplitude

    def check(self, case: SharedCase, results: tuple[Tensor, Tensor], *, expected: Any = None) -> None:
        """Compare with the oracle; rows behind the batch must still be NaN, and the guard untouched."""
        out, lse = results
        o, expected_lse, amplitude = expected or self.expected(case)
        tokens = sum(case.q_lens)
        assert_lse_close("lse", lse[:tokens], expected_lse)
        assert_close("out", out[:tokens], o, amplitude=amplitude)
        assert out[tokens:].isnan().all(), "rows behind the batch were written"
        assert lse[tokens:].isnan().all(), "rows behind the batch were written"
        assert (self.workspace[-GUARD_BYTES:] == POISON_BYTE).all(), "written behind workspace_size()"
