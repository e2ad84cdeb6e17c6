# SPDX-License-Identifier: Apache-2.0
"""What the shipped variants are by definition, in float64.

An oracle is given one request and nothing of an implementation: it turns queries, keys and positions into
weights. Tests and benchmarks hold variants against the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows of one request: float64 q [rows, heads, dim], k and v [keys, heads, dim], KV heads repeated.

    q_pos: positions of the rows. kv_pos: positions of the keys. index: number of the request in the batch.
    tokens: int64 [rows], where the rows stand in q of the batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_pos: Tensor
    kv_pos: Tensor
    scale: float
    index: int
    tokens: Tensor

    @property
    def distance(self) -> Tensor:
        """Key position - query position, [rows, keys]."""
        return self.kv_pos[None] - self.q_pos[:, None]


Arguments = Mapping[str, Any]


def logits(request: Request, q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Return scaled dot products [heads, rows, keys] of the request's queries and keys, or of others."""
    rows, keys = request.q if q is None else q, request.k if k is None else k
    return torch.einsum("qhd,khd->hqk", rows, keys) * request.scale


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """A variant by definition; each part is given the request and the arguments.

    visible: bool [rows, keys], of keys that the causal limit lets a row see. weights: of logits, in place of
    a softmax. values: float64 [keys, heads, dim_v], those that are weighed, and the sums of the magnitudes of
    what each is a sum of, by which its rounding is judged.
    """

    logits: Callable[[Request, Arguments], Tensor] = lambda r, _: logits(r)
    visible: Callable[[Request, Arguments], Tensor] | None = None
    weights: Callable[[Tensor], Tensor] | None = None
    values: Callable[[Request, Arguments], tuple[Tensor, Tensor]] = lambda r, _: (r.v, r.v.abs())
    output: Callable[[Request, Arguments, Tensor], Tensor] = lambda _r, _a, o: o

    def attention(self, request: Request, args: Arguments) -> tuple[Tensor, Tensor]:
        """Return (o, amplitude) of a causal request: [rows, heads, dim_v]."""
        seen = request.distance <= 0
        if self.visible is not None:
            seen = seen & self.visible(request, args)
        x = self.logits(request, args)
        if self.weights is not None:
            p = self.weights(x) * seen
        else:
            # Masked before the exponential: infinity times 0 is no number.
            x = x.masked_fill(~seen, -math.inf)
            p = torch.exp(x - x.amax(-1, keepdim=True).clamp(min=-1e300))
            p = p / p.sum(-1, keepdim=True).clamp(min=1e-300)
        v, size = self.values(request, args)
        o = torch.einsum("hqk,khd->qhd", p, v)
        amplitude = torch.einsum("hqk,khd->qhd", p.abs(), size)
        return self.output(request, args, o), self.output(request, args, amplitude).abs()


def _rotated(x: Tensor, positions: Tensor, args: Arguments, interleaved: bool) -> Tensor:
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
    """Return rotary embeddings of queries and keys at their positions, moved by the offsets."""

    def rope_logits(r: Request, args: Arguments) -> Tensor:
        q_pos, kv_pos = (
            positions + (int(args[name][r.index]) if name in args else 0)
            for positions, name in ((r.q_pos, "q_offset"), (r.kv_pos, "k_offset"))
        )
        return logits(r, _rotated(r.q, q_pos, args, interleaved), _rotated(r.k, kv_pos, args, interleaved))

    return Oracle(logits=rope_logits)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Rows of KV heads as rows of query heads, in float64."""
    return x.double().repeat_interleave(heads // x.shape[0], 0)


def _scaled_values(r: Request, args: Arguments) -> tuple[Tensor, Tensor]:
    heads = r.v.shape[1]
    v = r.v * _by_head(args["value_scale"], heads)
    offset = _by_head(args["value_offset"], heads)
    return v + offset, v.abs() + offset.abs()


ORACLES: Mapping[str, Oracle] = {
    "flash_sigmoid": Oracle(logits=lambda r, a: logits(r) + a["bias"], weights=torch.sigmoid),
    "soft_cap": Oracle(logits=lambda r, a: a["cap"] * torch.tanh(logits(r) / a["cap"])),
    "alibi": Oracle(logits=lambda r, a: logits(r) + a["slopes"].double()[:, None, None] * r.distance),
    "channel_scales": Oracle(
        logits=lambda r, a: logits(r, k=r.k * _by_head(a["key_scale"], r.k.shape[1])),
        values=_scaled_values,
    ),
    "logit_bias": Oracle(
        logits=lambda r, a: logits(r) + a["bias"][:, r.tokens, : r.k.shape[0]].double(),
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
    "output_gate": Oracle(output=lambda r, a, o: o * a["gate"][r.tokens].double().sigmoid()),
    "rope": rope_oracle(False),
    "rope_interleaved": rope_oracle(True),
}
"""By the name of the variant."""
