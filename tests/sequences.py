# SPDX-License-Identifier: Apache-2.0
"""Requests with all their tokens at hand, of which any part can be computed in any batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from attention_batch import SPLIT_COSTS, torch_threads
from engine_memory import Layout, choose_pages, kv_caches, move, page_table
from oracle import attention
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.planner import CostModel
from fi_backend.core.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Sequence:
    """All tokens of one request: q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, spec: AttentionSpec, length: int, seed: int) -> Sequence:
        generator = torch.Generator().manual_seed(seed)

        def normal(dtype: str, *shape: int) -> Tensor:
            return torch.randn(length, *shape, generator=generator).to(getattr(torch, dtype))

        return cls(
            normal(spec.dtype, spec.num_qo_heads, spec.head_dim),
            normal(spec.kv_dtype, spec.num_kv_heads, spec.head_dim),
            normal(spec.kv_dtype, spec.num_kv_heads, spec.head_dim_v),
        )


def extras(spec: AttentionSpec) -> dict[str, Tensor]:
    """ALiBi slopes and sinks, where the spec has them."""
    values = {}
    if spec.alibi:
        values["alibi_slopes"] = torch.linspace(0.01, 0.2, spec.num_qo_heads)
    if spec.sinks:
        values["sinks"] = torch.linspace(-2, 2, spec.num_qo_heads)
    return values


Part = tuple[Sequence, int, int]  # tokens [begin, end) of a sequence are the queries, [0, end) the keys


def compute(
    spec: AttentionSpec,
    parts: list[Part],
    *,
    slack: int = 0,
    num_ctas: int = 2,
    threads: int = 2,
    planned_queues: bool = False,
    costs: CostModel = SPLIT_COSTS,
    layout: Layout | None = None,
    page_seed: int = 0,
    device: str = "cpu",
    kernel: str | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each part when all of them are one batch, computed on `device` by `kernel`."""
    with torch_threads(1):
        layout = layout or Layout()
        random = torch.Generator().manual_seed(page_seed)
        kv_lens = tuple(end for _, _, end in parts)
        pages, num_pages = choose_pages(layout, kv_lens, spec.page_size, random)
        sizes = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim, spec.head_dim_v)
        k_cache, v_cache = kv_caches(layout, getattr(torch, spec.kv_dtype), *sizes)
        for ids, (sequence, _, end) in zip(pages, parts, strict=True):
            for n, page in enumerate(ids):
                tokens = slice(n * spec.page_size, min(end, (n + 1) * spec.page_size))
                k_cache[page, : tokens.stop - tokens.start] = sequence.k[tokens]
                v_cache[page, : tokens.stop - tokens.start] = sequence.v[tokens]
        k_cache, v_cache = move(device, k_cache, v_cache)
        lens = torch.tensor(kv_lens, dtype=torch.int32)
        attn = BatchAttention(
            spec,
            max_requests=len(parts),
            max_tokens=sum(end - begin for _, begin, end in parts),
            max_kv_len=max(kv_lens) + slack,
            num_ctas=num_ctas,
            planned_queues=planned_queues,
            costs=costs,
            device=device,
            kernel=kernel,
        )
        starts = torch.tensor([0, *[end - begin for _, begin, end in parts]]).cumsum(0).to(torch.int32)
        table = page_table(layout.table, pages, lens.to(device), spec.page_size, random)
        attn.plan(starts.to(device), table, qo_indptr_host=starts, kv_lens_host=lens + slack)
        q = torch.cat([sequence.q[begin:end] for sequence, begin, end in parts]).to(device)
        lse = torch.empty(q.shape[:2], device=device)
        given = {name: value.to(device) for name, value in extras(spec).items()}
        with torch_threads(threads):
            out = attn.run(q, k_cache, v_cache, lse=lse, **given)
        out, lse = out.cpu(), lse.cpu()
        bounds = starts.tolist()
        return [(out[a:b], lse[a:b]) for a, b in pairwise(bounds)]


def expected(spec: AttentionSpec, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, amplitude) of one part by the oracle."""
    sequence, begin, end = part
    options = extras(spec)
    values = sequence.v[:end].float()
    o, lse = attention(
        sequence.q[begin:end],
        sequence.k[:end].float(),
        torch.cat([values, values.abs()], dim=2),
        scale=spec.scale,
        causal=spec.causal,
        window_left=spec.window_left,
        soft_cap=spec.logits_soft_cap,
        slopes=options.get("alibi_slopes"),
        sinks=options.get("sinks"),
    )
    return o[..., : spec.head_dim_v], lse, o[..., spec.head_dim_v :]
