# SPDX-License-Identifier: Apache-2.0
"""The union ⊕ of attention states (o, lse) over disjoint sets of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core import ops
from fi_backend.core.ops_module import native_ops


def merge_state(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (o_a, lse_a) ⊕ (o_b, lse_b), the attention over both sets of keys.

    All tensors lie on one device, the CPU or a CUDA device; there the call is queued on torch's current
    stream, never waits for the device, allocates only the results that are not given, and may be captured.
    The arithmetic is float32 and its bits do not depend on the run; those of `exp` and `log` differ between
    kinds of devices.
    o_a, o_b: [n, heads, head_dim] of one dtype, float32, float16 or bfloat16, last dimension contiguous.
    lse_a, lse_b: float32 [n, heads], natural logarithm. An empty set has lse = -inf; it leaves the other
        side's bits as they are, whatever its o holds, and two of them give o = 0, lse = -inf.
    out, lse: results, allocated by default; each may be an input itself (in place), but no other view that
        overlaps one. mask: bool [n]; rows where it is False become a copy of side a.

    Returns (out, lse). Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    _expect_tensors(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    if torch.compiler.is_compiling():
        return _deliver(torch.ops.fi_backend.merge_state(o_a, lse_a, o_b, lse_b, mask), out, lse)
    return _merge_state(o_a, lse_a, o_b, lse_b, mask, out, lse)


def _merge_state(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    mask: Tensor | None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(o_a, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format) if lse is None else lse
    native = native_ops("o_a", o_a.device)
    native.merge_state(o_a, lse_a, o_b, lse_b, mask, *_threads(o_a), out, lse)
    return out, lse


def merge_states(
    o: Tensor, lse_parts: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the left fold of ⊕ over dimension 1: ((part 0 ⊕ part 1) ⊕ part 2) ⊕ ...

    o: [n, parts, heads, head_dim], float32, float16 or bfloat16, last dimension contiguous; the fold itself
        is float32. lse_parts: float32 [n, parts, heads], natural logarithm, -inf for an empty set. No part
        at all gives o = 0, lse = -inf. Devices: as for merge_state().
    out: [n, heads, head_dim], lse: float32 [n, heads]; allocated by default; each may be one part of its
        input, such as o[:, 0], but no other view that overlaps one.

    Returns (out, lse). Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    _expect_tensors(o=o, lse_parts=lse_parts)
    if torch.compiler.is_compiling():
        return _deliver(torch.ops.fi_backend.merge_states(o, lse_parts), out, lse)
    return _merge_states(o, lse_parts, out, lse)


def _merge_states(
    o: Tensor, lse_parts: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if o.dim() != 4:
        raise ValueError(f"o: expected [n, parts, heads, head_dim]; got shape {tuple(o.shape)}.")
    n, _, heads, dim = o.shape
    out = o.new_empty(n, heads, dim) if out is None else out
    lse = lse_parts.new_empty(n, heads) if lse is None else lse
    native_ops("o", o.device).merge_states(o, lse_parts, *_threads(o), out, lse)
    return out, lse


def _threads(o: Tensor) -> tuple[int, ...]:
    # An argument of the host's functions alone.
    return (torch.get_num_threads(),) if o.device.type == "cpu" else ()


def _expect_tensors(**arguments: object) -> None:
    for name, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch tensor; got {type(tensor).__name__}.")


def _deliver(result: tuple[Tensor, Tensor], out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    # The operators are functional, so that a compiler may place results where it likes.
    o, o_lse = result
    return (
        o if out is None else out.copy_(o),
        o_lse if lse is None else lse.copy_(o_lse),
    )


ops.define(
    "merge_state(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, Tensor? mask) -> (Tensor, Tensor)",
    _merge_state,
    lambda o_a, lse_a, *_: (
        torch.empty_like(o_a, memory_format=torch.contiguous_format),
        torch.empty_like(lse_a, memory_format=torch.contiguous_format),
    ),
)
ops.define(
    "merge_states(Tensor o, Tensor lse_parts) -> (Tensor, Tensor)",
    _merge_states,
    lambda o, lse_parts: (
        o.new_empty(o.shape[0], *o.shape[2:]),
        lse_parts.new_empty(lse_parts.shape[0], lse_parts.shape[2]),
    ),
)
