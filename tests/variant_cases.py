# SPDX-License-Identifier: Apache-2.0
"""Batches for variants of attention, and what the shipped ones are by definition, in float64.

An oracle is given one request and nothing of the implementation: it turns (q, k, positions) into weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numeric import assert_close
from torch import Tensor

from fi_backend import AttentionSpec, AttentionVariant, BatchAttention, PageTable
from fi_backend.core.planner import CostModel
from fi_backend.core.sharing import SharingLimits


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request for an oracle: float64 [rows or keys, heads, dim], KV heads repeated for query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor  # [rows]
    kv_pos: Tensor  # [keys]
    scale: float
    index: int
    first_token: int  # row of q in the batch

    @property
    def distance(self) -> Tensor:
        """Key position - query position, [rows, keys]."""
        return self.kv_pos[None] - self.q_pos[:, None]


def logits(request: Request, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Scaled dot products [heads, rows, keys] of the request's queries and keys, or of others."""
    rows, keys = request.q if q is None else q, request.k if k is None else k
    return torch.einsum("qhd,khd->hqk", rows, keys) * request.scale


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """A variant by definition; each part is given the request and the arguments."""

    logits: Callable[[Request, Mapping[str, Any]], Tensor] = lambda r, _: logits(r)
    visible: Callable[[Request, Mapping[str, Any]], Tensor] | None = None
    weights: Callable[[Tensor], Tensor] | None = None  # of logits, in place of a softmax
    output: Callable[[Request, Mapping[str, Any], Tensor], Tensor] = lambda _r, _a, o: o

    def attention(self, request: Request, args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return (o, amplitude) of a causal request: [rows, heads, dim_v]."""
        seen = request.distance <= 0
        if self.visible is not None:
            seen = seen & self.visible(request, args)
        x = self.logits(request, args)
        if self.weights is not None:
            p = self.weights(x) * seen
        else:
            p = torch.exp(x - x.masked_fill(~seen, -math.inf).amax(-1, keepdim=True).clamp(min=-1e300)) * seen
            p = p / p.sum(-1, keepdim=True).clamp(min=1e-300)
        o = torch.einsum("hqk,khd->qhd", p, request.v)
        amplitude = torch.einsum("hqk,khd->qhd", p.abs(), request.v.abs())
        return self.output(request, args, o), self.output(request, args, amplitude).abs()


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
    seed: int = 0


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
        num_ctas=4 if batch.device == "cpu" else None,
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
    shape = (sum(counts), page, hkv, dim)
    k, v = ((torch.randn(shape, generator=random) / batch.k_scale**i).to(kv_dtype) for i in (1, 0))
    q = torch.randn(tokens, hq, dim, generator=random).to(getattr(torch, spec.dtype))
    starts = torch.tensor([0, *batch.q_lens]).cumsum(0).int()
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    there = {name: x.to(batch.device) if isinstance(x, Tensor) else x for name, x in args.items()}
    attention.plan(
        starts.to(batch.device),
        PageTable.from_block_table(table.to(batch.device), lens.to(batch.device), page_size=page),
        qo_indptr_host=starts,
        kv_lens_host=lens,
        detect_prefixes=bool(batch.shared_pages),
    )
    out = torch.full((tokens, hq, dim), math.nan, dtype=q.dtype, device=batch.device)
    attention.run(
        *(x.to(batch.device) for x in (q, k, v)), out=out, k_scale=batch.k_scale, variant_args=there
    )
    expected, amplitude = [], []
    for r, (q_len, kv_len) in enumerate(zip(batch.q_lens, batch.kv_lens, strict=True)):
        keys, values = (x[ids[r]].flatten(0, 1)[:kv_len].float().double() for x in (k, v))
        begin = int(starts[r])
        request = Request(
            q=q[begin : begin + q_len].double(),
            k=keys.repeat_interleave(hq // hkv, 1) * batch.k_scale,
            v=values.repeat_interleave(hq // hkv, 1),
            q_pos=torch.arange(q_len) + kv_len - q_len,
            kv_pos=torch.arange(kv_len),
            scale=spec.scale,
            index=r,
            first_token=begin,
        )
        o, size = oracle.attention(request, args)
        expected.append(o)
        amplitude.append(size)
    assert_close("out", out.cpu(), torch.cat(expected), amplitude=torch.cat(amplitude), slack=2.0)
    return attention


def _rotated(x: Tensor, positions: Tensor, args: Mapping[str, Any], interleaved: bool) -> Tensor:
    turns = args["frequencies"].double().sum(1)
    angle = (2 * math.pi * positions[:, None].double() * turns)[:, None]
    c, s = angle.cos(), angle.sin()
    half = turns.numel()
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = rotary[..., 0::2], rotary[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = rotary[..., :half], rotary[..., half:]
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned, rest), -1)


def rope_oracle(interleaved: bool) -> Oracle:
    """Rotary embeddings of queries and keys at their positions, moved by the offsets."""

    def rope_logits(r: Request, args: Mapping[str, Any]) -> Tensor:
        q_pos, kv_pos = (
            positions + (int(args[name][r.index]) if name in args else 0)
            for positions, name in ((r.q_pos, "q_offset"), (r.kv_pos, "k_offset"))
        )
        return logits(r, _rotated(r.q, q_pos, args, interleaved), _rotated(r.k, kv_pos, args, interleaved))

    return Oracle(logits=rope_logits)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _per_row(r: Request, x: Tensor) -> Tensor:
    return x[r.first_token : r.first_token + r.q.shape[0]].double()


ORACLES: Mapping[str, Oracle] = {
    "flash_sigmoid": Oracle(logits=lambda r, a: logits(r) + a["bias"], weights=torch.sigmoid),
    "soft_cap": Oracle(logits=lambda r, a: a["cap"] * torch.tanh(logits(r) / a["cap"])),
    "alibi": Oracle(logits=lambda r, a: logits(r) + a["slopes"].double()[:, None, None] * r.distance),
    "logit_bias": Oracle(
        logits=lambda r, a: (
            logits(r) + _per_row(r, a["bias"].transpose(0, 1)).transpose(0, 1)[..., : r.k.shape[0]]
        )
    ),
    "sliding_window": Oracle(visible=lambda r, a: r.distance > -a["window"]),
    "sink_window": Oracle(
        visible=lambda r, a: (r.distance > -a["window"]) | (r.kv_pos < a["sink_tokens"])[None]
    ),
    "qk_norm": Oracle(
        logits=lambda r, a: logits(
            r, _norm(r.q, a["q_weight"], a["eps"]), _norm(r.k, a["k_weight"], a["eps"])
        )
    ),
    "output_scale": Oracle(output=lambda _r, a, o: o * a["scale"].double()[None, :, None]),
    "output_gate": Oracle(output=lambda r, a, o: o * _per_row(r, a["gate"]).sigmoid()),
    "rope": rope_oracle(False),
    "rope_interleaved": rope_oracle(True),
}


def arguments(name: str, batch: VariantBatch) -> dict[str, Any]:
    """Random arguments of a shipped variant for a batch."""
    from fi_backend.variants import Llama31Scaling, rope_frequencies

    random = torch.Generator().manual_seed(batch.seed + 1)
    heads, tokens, requests = batch.heads[0], sum(batch.q_lens), len(batch.q_lens)

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
