# SPDX-License-Identifier: Apache-2.0
"""Write the keys and values of new tokens into their slots of a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.core import ops
from fi_backend.core.ops_module import native_ops

_Scale = float | Tensor
_TENSORS = ("key", "value", "k_cache", "v_cache", "slot_mapping")


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

    All tensors lie on one device, the CPU or a CUDA device, and both give the same bits.
    key: [tokens, num_kv_heads, head_dim], value: [tokens, num_kv_heads, head_dim_v]; float32, float16 or
        bfloat16, last dimension contiguous. k_cache: [pages, page_size, num_kv_heads, head_dim] or
        [total, num_kv_heads, head_dim], v_cache alike with head_dim_v; any of these dtypes or fp8, any
        strides with a contiguous last dimension. fp8 values saturate at the largest finite number.
    slot_mapping: int64 [n], n <= tokens: page * page_size + offset of each token, -1 to skip it. Tokens
        past n are padding. The slots of one call have to differ.
    k_scale, v_scale: float, or float32 [1] or [num_kv_heads]; run() multiplies by the same.

    On CUDA the call is queued on torch's current stream, allocates nothing, never waits for the device and
    may be captured. It cannot look at the slots then: tokens whose slot lies outside the cache are skipped.
    With FI_BACKEND_DEBUG=1 it waits and checks them, except while a graph is being captured.

    Raises ValueError or TypeError that names the argument (on the CPU, and in debug mode, also for a slot
    outside the cache); nothing is written then.
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
    option = torch.get_num_threads() if key.device.type == "cpu" else env.debug()
    native = native_ops("key", key.device)
    native.append_kv(key, value, slots, k_scale, v_scale, option, k_cache, v_cache)


ops.define(
    "append_kv(Tensor key, Tensor value, Tensor slot_mapping, Tensor k_scale, Tensor v_scale, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache) -> ()",
    _append_kv,
    lambda *_: None,
)
