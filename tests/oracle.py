# SPDX-License-Identifier: Apache-2.0
"""The oracle: attention by its definition, in float64, one request at a time.

It is slow and obvious on purpose and shares no code with the implementation: lengths, masks and scales come
as plain Python values, K and V as the tokens of each request in order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gather(cache: Tensor, pages: list[int], kv_len: int) -> Tensor:
    """The first `kv_len` tokens of one request: [kv_len, heads, dim] out of cache [pages, page, heads, dim].

    fp8 is decoded by torch's own conversion to float32.
    """
    page_size, tokens = cache.shape[1], []
    for position in range(kv_len):
        tokens.append(cache[pages[position // page_size], position % page_size].float())
    return torch.stack(tokens) if tokens else torch.zeros(0, *cache.shape[2:])


def visible(
    q_len: int, kv_len: int, causal: bool = True, window_left: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Bool [q_len, kv_len]: which keys a query token sees. The last query stands at the last key."""
    q_pos = torch.arange(q_len).view(-1, 1) + kv_len - q_len
    k_pos = torch.arange(kv_len).view(1, -1)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool) if mask is None else mask.clone()
    if causal:
        seen &= k_pos <= q_pos
    if window_left >= 0:
        seen &= q_pos - k_pos <= window_left
    return seen


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    soft_cap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    k_scale: Tensor | float = 1.0,
    v_scale: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """One request: q [q_len, Hq, D], k [kv_len, Hkv, D], v [kv_len, Hkv, Dv] -> o [q_len, Hq, Dv], lse.

    lse: [q_len, Hq]. slopes, sinks: [Hq]. mask: bool [q_len, kv_len]. k_scale, v_scale: a number or [Hkv].
    Everything is float64; a row without a visible key has o = 0 and lse = -inf, with a sink as well.
    """
    q_len, num_qo_heads, dim = q.shape
    kv_len, num_kv_heads, _ = k.shape
    group = num_qo_heads // num_kv_heads
    seen = visible(q_len, kv_len, causal, window_left, mask)
    distance = torch.arange(kv_len).view(1, -1) - (torch.arange(q_len).view(-1, 1) + kv_len - q_len)

    def per_query_head(x: Tensor, factor: Tensor | float) -> Tensor:
        scaled = x.double() * torch.as_tensor(factor, dtype=torch.float64).expand(num_kv_heads).view(1, -1, 1)
        return scaled.repeat_interleave(group, dim=1).transpose(0, 1)

    keys, values = per_query_head(k, k_scale), per_query_head(v, v_scale)  # [Hq, kv_len, D], [Hq, kv_len, Dv]
    logits = q.double().transpose(0, 1) @ keys.transpose(1, 2) * (dim**-0.5 if scale is None else scale)
    if soft_cap > 0:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if slopes is not None:
        logits = logits + slopes.double().view(-1, 1, 1) * distance
    logits = logits.masked_fill(~seen, -math.inf)
    terms = logits
    if sinks is not None:
        terms = torch.cat([logits, sinks.double().view(-1, 1, 1).expand(-1, q_len, 1)], dim=2)
    rows = seen.any(dim=1)
    lse = torch.full((num_qo_heads, q_len), -math.inf, dtype=torch.float64)
    lse[:, rows] = torch.logsumexp(terms[:, rows], dim=2)
    o = torch.zeros(num_qo_heads, q_len, v.shape[2], dtype=torch.float64)
    o[:, rows] = torch.exp(logits[:, rows] - lse[:, rows, None]) @ values
    return o.transpose(0, 1), lse.T
