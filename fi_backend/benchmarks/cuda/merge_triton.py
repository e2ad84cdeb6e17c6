# SPDX-License-Identifier: Apache-2.0
"""Merging of two attention states whose log-sum-exps are [heads, tokens], as FlashAttention returns them.

Our own operator takes [tokens, heads]; transposing first would charge two more launches to the peer.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _merge(o_a, lse_a, o_b, lse_b, out, tokens, heads, dim: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0)
    head = tl.program_id(1)
    a = tl.load(lse_a + head * tokens + token)
    b = tl.load(lse_b + head * tokens + token)
    top = tl.maximum(a, b)
    weight_a = tl.exp(a - top)
    weight_b = tl.exp(b - top)
    column = tl.arange(0, width)
    at = (token * heads + head) * dim + column
    valid = column < dim
    x_a = tl.load(o_a + at, mask=valid, other=0.0).to(tl.float32)
    x_b = tl.load(o_b + at, mask=valid, other=0.0).to(tl.float32)
    merged = (x_a * weight_a + x_b * weight_b) / (weight_a + weight_b)
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=valid)


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, out: Tensor) -> None:
    """Write the merged state. o_a, o_b, out: contiguous [tokens, heads, dim]; lse: float32 [heads, tokens].

    Each token has keys on one side at least.
    """
    tokens, heads, dim = out.shape
    _merge[(tokens, heads)](
        o_a, lse_a, o_b, lse_b, out, tokens, heads, dim=dim, width=triton.next_power_of_2(dim)
    )
