# SPDX-License-Identifier: Apache-2.0
"""The scratch memory that all attention layers of a process share, and the kernels that they run.

Layers run one after another, so one scratch area serves them all.
"""

from __future__ import annotations

from functools import cache

import torch

from fi_backend import env
from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.planner import Limits
from fi_backend.core.prepare import prepare
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import resolve
from fi_backend.core.variant import AttentionVariant

_ALIGNMENT = 128
# While it builds a model, vLLM makes the GPU the place of every tensor that names none; plans name none.
_ON_HOST = torch.device("cpu")
_pool: dict[torch.device, torch.Tensor] = {}


def reserve(
    spec: AttentionSpec,
    limits: Limits,
    device: torch.device,
    sharing: SharingLimits | None = None,
    variant: AttentionVariant | None = None,
) -> None:
    """Allocate the scratch memory that `spec` needs and load its kernels, compiling them if need be.

    Called while the model is built: before vLLM measures what is left for the KV cache, and before a
    request could wait for a compiler. sharing: capacity for shared prefixes. variant: functors of the user.
    """
    with _ON_HOST:
        size = _prepare(spec, limits, device, sharing, variant)
    held = _pool.get(device)
    if held is None or held.numel() < size:
        memory = torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device=device)
        # Written to, because vLLM's CPU worker counts resident pages only.
        memory.zero_()
        start = -memory.data_ptr() % _ALIGNMENT
        _pool[device] = memory[start : start + size]


def batch_attention(
    spec: AttentionSpec,
    limits: Limits,
    device: torch.device,
    sharing: SharingLimits | None = None,
    variant: AttentionVariant | None = None,
) -> BatchAttention:
    """Return an attention with plans of its own that runs in the shared scratch memory of `device`."""
    device = resolve(device)
    reserve(spec, limits, device, sharing, variant)
    with _ON_HOST:
        return _construct(spec, limits, device, sharing, variant, _pool[device])


@cache
def _prepare(
    spec: AttentionSpec,
    limits: Limits,
    device: torch.device,
    sharing: SharingLimits | None,
    variant: AttentionVariant | None,
) -> int:
    """Load the kernels of `spec`; return the bytes of scratch memory that it needs."""
    # A variant has a kernel of its own, which BatchAttention builds, and says which line of it is wrong.
    prepare(*([spec] if variant is None else []), device=device)
    nothing = torch.empty(
        0, spec.num_kv_heads, spec.head_dim, dtype=getattr(torch, spec.dtype), device=device
    )
    append_kv(nothing, nothing, nothing, nothing, torch.empty(0, dtype=torch.int64, device=device))
    return _construct(spec, limits, device, sharing, variant, None).workspace_size()


def _construct(
    spec: AttentionSpec,
    limits: Limits,
    device: torch.device,
    sharing: SharingLimits | None,
    variant: AttentionVariant | None,
    workspace: torch.Tensor | None,
) -> BatchAttention:
    return BatchAttention(
        spec,
        max_requests=limits.max_requests,
        max_tokens=limits.max_tokens,
        max_kv_len=limits.max_kv_len,
        device=device,
        num_ctas=_workers(device),
        longest_first=env.LPT not in env.without(),
        workspace=workspace,
        sharing=sharing,
        variant=variant,
    )


@cache
def _workers(device: torch.device) -> int | None:
    """Workers to balance over; vLLM changes torch's thread count after loading, and sizes must not follow."""
    return torch.get_num_threads() if device.type == "cpu" else None
