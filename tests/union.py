# SPDX-License-Identifier: Apache-2.0
"""The union of attention states in float64, and random states, for the tests of ⊕ on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def exact_union(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Union over dimension 1 in float64; the third result is the amplitude of each sum."""
    o, lse = o.double(), lse.double()
    empty = torch.isneginf(lse)
    # Weights are normalised by their sum: log(2) vanishes beside a logarithm of 1e30.
    top = torch.where(empty.all(1), 0.0, lse.amax(1))
    weight = torch.where(empty, 0.0, torch.exp(lse - top[:, None]))
    weight = (weight / torch.where(empty.all(1), 1.0, weight.sum(1))[:, None])[..., None]
    terms = torch.where(empty[..., None], 0.0, o) * weight
    return terms.sum(1), torch.logsumexp(lse, dim=1), terms.abs().sum(1)


def states(
    n: int, parts: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Random (o [n, parts, heads, dim], lse [n, parts, heads]) in host memory."""
    generator = torch.Generator().manual_seed(seed)
    o = torch.randn(n, parts, heads, dim, generator=generator).to(dtype)
    return o, torch.randn(n, parts, heads, generator=generator) * 5
