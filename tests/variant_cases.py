# SPDX-License-Identifier: Apache-2.0
"""Batches for variants of attention, held against their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numeric import assert_close
from torch import Tensor

from fi_backend import AttentionSpec, AttentionVariant, BatchAttention, PageTable
from fi_backend.benchmarks.variant_oracles import ORACLES, Oracle, Request, logits
from fi_backend.core.planner import CostModel
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.share_tally import Saved
from fi_backend.core.sharing import SharingLimits

__all__ = [
    "ORACLES",
    "SPLIT",
    "Oracle",
    "VariantBatch",
    "arguments",
    "check_climbing_maxima",
    "check_shared_prefix",
    "check_variant",
    "logits",
]


@dataclass(frozen=True, kw_only=True)
class VariantBatch:
    """A step: lengths, shapes and dtypes; causal."""

    q_lens: tuple[int, ...] = (1, 3, 40, 1)
    kv_lens: tuple[int, ...] = (200, 64, 100, 700)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: str = "float32"
    kv_dtype: str = ""
    page_size: int = 16
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the spec
    split: bool = False
    shared_pages: int = 0  # all requests begin with these pages of the first one
    k_scale: float = 1.0
    v_scale: float = 1.0
    host_lengths: bool = True  # on CUDA: the host planner; otherwise the device planner
    num_ctas: int | None = 4  # None: as many as the device has multiprocessors
    seed: int = 0

    @property
    def head_dim_v(self) -> int:
        return int(self.options.get("head_dim_v", self.head_dim))


SPLIT = CostModel(granule=16, min_chunk=16, alpha=1, beta=(1, 1, 1, 1, 1), part_cost=1, share_cost=0)


def check_variant(
    variant: AttentionVariant | str, oracle: Oracle, args: Mapping[str, Any], batch: VariantBatch
) -> BatchAttention:
    """Run the batch with the variant and compare every row with the oracle; returns what ran it."""
    random = torch.Generator().manual_seed(batch.seed)
    (hq, hkv), dim, page = batch.heads, batch.head_dim, batch.page_size
    spec = AttentionSpec(
        hq, hkv, dim, dtype=batch.dtype, kv_dtype=batch.kv_dtype, page_size=page, **batch.options
    )
    tokens, requests = sum(batch.q_lens), len(batch.q_lens)
    attention = BatchAttention(
        spec,
        max_requests=requests,
        max_tokens=tokens,
        max_kv_len=max(batch.kv_lens),
        device=batch.device,
        num_ctas=batch.num_ctas,
        costs=SPLIT if batch.split else None,
        sharing=SharingLimits(4, 2, tokens) if batch.shared_pages else None,
        variant=variant,
    )
    counts = [-(-n // page) for n in batch.kv_lens]
    ids = [pages.clone() for pages in torch.randperm(sum(counts), generator=random).split(counts)]
    for pages in ids[1:]:
        pages[: batch.shared_pages] = ids[0][: batch.shared_pages]
    table = torch.full((requests, max(counts)), -1, dtype=torch.int32)
    for row, pages in zip(table, ids, strict=True):
        row[: pages.numel()] = pages.int()
    kv_dtype = getattr(torch, spec.kv_dtype)
    k, v = (
        (torch.randn(sum(counts), page, hkv, width, generator=random) / scale).to(kv_dtype)
        for width, scale in ((dim, batch.k_scale), (spec.head_dim_v, batch.v_scale))
    )
    q = torch.randn(tokens, hq, dim, generator=random).to(getattr(torch, spec.dtype))
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).int()
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    there = {name: x.to(batch.device) if isinstance(x, Tensor) else x for name, x in args.items()}
    there_table = PageTable.from_block_table(table.to(batch.device), lens.to(batch.device), page_size=page)
    if batch.host_lengths:
        forest = None
        if batch.shared_pages:
            forest = PrefixForest.of_step(
                PageTable.from_block_table(table, lens, page_size=page),
                *(starts, lens),
                group=spec.group_size,
                max_tile=attention.planner.tiles[1],
            )
        attention.plan(
            starts.to(batch.device), there_table, qo_indptr_host=starts, kv_lens_host=lens, forest=forest
        )
    else:
        attention.plan(starts.to(batch.device), there_table, detect_prefixes=bool(batch.shared_pages))
    out = torch.full((tokens, hq, spec.head_dim_v), math.nan, dtype=q.dtype, device=batch.device)
    attention.run(
        *(x.to(batch.device) for x in (q, k, v)),
        out=out,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        variant_args=there,
    )
    expected, amplitude = [], []
    for r, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        keys, values = (x[ids[r]].flatten(0, 1)[:kv_len].float().double() for x in (k, v))
        begin = int(starts[r])
        request = Request(
            q=q[begin : begin + q_len].double(),
            k=keys.repeat_interleave(hq // hkv, 1) * batch.k_scale,
            v=values.repeat_interleave(hq // hkv, 1) * batch.v_scale,
            q_pos=torch.arange(q_len) + kv_len - q_len,
            kv_pos=torch.arange(kv_len),
            scale=spec.scale,
            index=r,
            tokens=torch.arange(begin, begin + q_len),
        )
        o, size = oracle.attention(request, args)
        expected.append(o)
        amplitude.append(size)
    assert_close("out", out.cpu(), torch.cat(expected), amplitude=torch.cat(amplitude), slack=2.0)
    return attention


def check_shared_prefix(name: str, batch: VariantBatch) -> None:
    """Decode three requests behind 32 shared pages, which the plan has to read once."""
    batch = replace(batch, q_lens=(1, 1, 1), kv_lens=(600, 700, 900), shared_pages=32, split=True)
    attention = check_variant(name, ORACLES[name], arguments(name, batch), batch)
    assert attention.tally is not None
    planned = attention.tally.tensor if not batch.host_lengths else None
    saved = attention.tally.take() if planned is None else Saved(*planned.tolist())
    assert saved.nodes > 0, "nothing was shared"
    assert saved.tokens == 2 * 32 * batch.page_size


def arguments(name: str, batch: VariantBatch) -> dict[str, Any]:
    """Random arguments of a shipped variant for a batch."""
    from fi_backend.variants import Llama31Scaling, rope_frequencies

    random = torch.Generator().manual_seed(batch.seed + 1)
    (heads, kv_heads), tokens, requests = batch.heads, sum(batch.q_lens), len(batch.q_lens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    rope = {
        "frequencies": rope_frequencies(
            batch.head_dim // 2 if batch.seed % 2 else batch.head_dim, theta=5e5, scaling=Llama31Scaling()
        ),
        "q_offset": torch.randint(0, 100000, (requests,), generator=random).int(),
        "k_offset": torch.randint(0, 100000, (requests,), generator=random).int(),
    }
    return {
        "flash_sigmoid": lambda: {"bias": -3.5},
        "soft_cap": lambda: {"cap": 1.5},
        "alibi": lambda: {"slopes": normal(heads).abs() * 0.1},
        "channel_scales": lambda: {
            "key_scale": normal(kv_heads, batch.head_dim).abs() + 0.1,
            "value_scale": normal(kv_heads, batch.head_dim_v),
            "value_offset": normal(kv_heads, batch.head_dim_v),
        },
        "logit_bias": lambda: {"bias": normal(heads, tokens, max(batch.kv_lens))},
        "sliding_window": lambda: {"window": 33},
        "sink_window": lambda: {"window": 33, "sink_tokens": 5},
        "qk_norm": lambda: {
            "q_weight": normal(batch.head_dim),
            "k_weight": normal(batch.head_dim),
            "eps": 0.1,
        },
        "output_scale": lambda: {"scale": normal(heads)},
        "output_gate": lambda: {"gate": normal(tokens, heads, batch.head_dim).bfloat16()},
        "rope": lambda: rope,
        "rope_interleaved": lambda: rope,
    }[name]()


def check_climbing_maxima(
    name: str, *, device: torch.device | str = "cpu", num_ctas: int | None = None
) -> None:
    """One request under `channel_scales` of 1 (name), whose logits rise by more at once than weights may.

    A warp that transforms its own keys weighs them by the maximum so far, unless they rise by too much.
    """
    levels = torch.tensor([0, 2, 3, 16, 15, 64, 0, 64, 80, 250]).repeat_interleave(64)  # logits of keys
    spec = AttentionSpec(4, 2, 64, scale=1.0)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, 4, 64), torch.zeros(len(levels), 2, 64)
    q[..., 0], q[..., 1:] = 1, torch.randn(1, 4, 63, generator=generator) * 0.125
    k[..., 0], k[..., 1:] = levels[:, None], torch.randn(len(levels), 2, 63, generator=generator)
    v = torch.randn(len(levels), 2, 64, generator=generator)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    ones = {each: torch.ones(2, 64, device=device) for each in ("key_scale", "value_scale")}
    for length in (64, 200, 320, 448, len(levels)):
        attention = BatchAttention(
            spec,
            max_requests=1,
            max_tokens=1,
            max_kv_len=length,
            num_ctas=num_ctas,
            device=device,
            variant=name,
        )
        starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        table = PageTable.ragged(torch.tensor([0, length], dtype=torch.int32, device=device))
        attention.plan(starts.to(device), table, qo_indptr_host=starts, kv_lens_host=lens)
        lse = torch.full((1, 4), math.nan, device=device)
        out = torch.full(q.shape, math.nan, dtype=q.dtype, device=device)
        attention.run(
            *(x.to(device) for x in (q, k[:length], v[:length])), out=out, lse=lse, variant_args=ones
        )
        keys, values = (x[:length].double().repeat_interleave(2, dim=1) for x in (k, v))
        logits = torch.einsum("thd,khd->thk", q.double(), keys)
        exact = torch.einsum("thk,khd->thd", logits.softmax(-1), values)
        torch.testing.assert_close(out.cpu().double(), exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.cpu().double(), logits.logsumexp(-1), atol=1e-3, rtol=1e-5)
