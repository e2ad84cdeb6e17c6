# SPDX-License-Identifier: Apache-2.0
"""Write the keys and values of new tokens into their slots of a KV cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fi_backend.core import jit, ops
from fi_backend.core.kernels import OPS_MODULE

_Scale = float | Tensor
_TENSORS = ("key", "value", "k_cache", "v_cache", "slot_mapping")


@cache
def _native() -> Any:
    return jit.load(OPS_MODULE).append_kv


def append_kv(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: _Scale = 1.0,
    v_scale: _Scale = 1.0,
) -> None:
    """Write key / k_scale and value / v_scale into the caches, rounded to the caches' dtype.

    key: [tokens, num_kv_heads, head_dim], value: [tokens, num_kv_heads, head_dim_v]; float32, float16 or
        bfloat16, last dimension contiguous. k_cache: [pages, page_size, num_kv_heads, head_dim] or
        [total, num_kv_heads, head_dim], v_cache alike with head_dim_v; any of these dtypes or fp8, any
        strides with a contiguous last dimension. fp8 values saturate at the largest finite number.
    slot_mapping: int64 [n], n <= tokens: page * page_size + offset of each token, -1 to skip it. Tokens
        past n are padding. The slots of one call have to differ.
    k_scale, v_scale: float, or float32 [1] or [num_kv_heads]; run() multiplies by the same.

    Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    for name, tensor in zip(_TENSORS, (key, value, k_cache, v_cache, slot_mapping), strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a torch tensor; got {type(tensor).__name__}.")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype is torch.uint8:
            raise TypeError(
                f"{name}: expected a float or fp8 dtype; got uint8, which does not say which fp8 format it "
                "holds. Pass cache.view(torch.float8_e4m3fn) or .view(torch.float8_e5m2)."
            )
    call = torch.ops.fi_backend.append_kv if torch.compiler.is_compiling() else _append_kv
    call(
        key,
        value,
        slot_mapping,
        ops.scale_tensor("k_scale", k_scale, k_cache.device),
        ops.scale_tensor("v_scale", v_scale, k_cache.device),
        k_cache,
        v_cache,
    )


def _append_kv(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    _native()(key, value, slots, k_scale, v_scale, torch.get_num_threads(), k_cache, v_cache)


ops.define(
    "append_kv(Tensor key, Tensor value, Tensor slot_mapping, Tensor k_scale, Tensor v_scale, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    _append_kv,
    lambda *_: None,
)
