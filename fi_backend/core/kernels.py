# SPDX-License-Identifier: Apache-2.0
"""The native attention kernels: which module serves a spec, and the call into it.

Eager code calls the native function directly; under torch.compile the same call goes through the
operator ``fi_backend::attention`` (a dispatcher call costs about 3 us, the direct one under 1 us).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.core import jit, ops
from fi_backend.core.custom_mask import PackedMask
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec

OPS_MODULE = jit.ModuleSpec(name="cpu_ops", sources=("cpu/append.cc", "cpu/merge.cc", "bind/cpu_ops.cc"))

_SCHEMA = (
    "attention(str kernel, Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor? indices, "
    "Tensor row_begin, Tensor row_end, Tensor kv_lens, int index_step, int index_divisor, int page_size, "
    "int num_pages, Tensor(a!) plan, Tensor capacity, Tensor(b!) workspace, float scale, Tensor k_scale, "
    "Tensor v_scale, bool causal, int window_left, float soft_cap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? mask_begin, Tensor? mask_kv_len, Tensor(c!) out, "
    "Tensor(d!)? lse) -> ()"
)


def attention_module(dtype: str, kv_dtype: str) -> jit.ModuleSpec:
    """The CPU module that serves queries of `dtype` over a cache of `kv_dtype`."""
    return jit.ModuleSpec(
        name=f"cpu_attention_{dtype}_{kv_dtype}",
        sources=("cpu/attention.cc", "cpu/attention_check.cc", "bind/cpu_attention.cc"),
        defines=(("FI_Q_DTYPE", dtype), ("FI_KV_DTYPE", kv_dtype)),
    )


@cache
def _native(kernel: str) -> Any:
    dtype, kv_dtype = kernel.split("/")
    return jit.load(attention_module(dtype, kv_dtype)).run


def attention_key(spec: AttentionSpec) -> str:
    """Build or load the module for `spec` and return the name that run_attention() knows it by."""
    key = f"{spec.dtype}/{spec.kv_dtype}"
    _native(key)
    return key


def run_attention(
    kernel: str,
    spec: AttentionSpec,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    table: PageTable,
    mask: PackedMask | None,
    plan: Tensor,
    capacity: Tensor,
    workspace: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Run a planned step; arguments as in BatchAttention.run() and .plan().

    Raises ValueError or TypeError naming the argument before anything is written.
    """
    pages = k_cache.shape[0] if k_cache.dim() == 4 else -(-k_cache.shape[0] // table.page_size)
    arguments = (
        q,
        k_cache,
        v_cache,
        qo_indptr,
        table.indices,
        table.row_begin,
        table.row_end,
        table.kv_lens,
        table.index_step,
        table.index_divisor,
        table.page_size,
        pages,
        plan,
        capacity,
        workspace,
        spec.scale,
        k_scale,
        v_scale,
        spec.causal,
        spec.window_left,
        spec.logits_soft_cap,
        alibi_slopes,
        sinks,
        None if mask is None else mask.bits,
        None if mask is None else mask.begin,
        None if mask is None else mask.kv_len,
        out,
        lse,
    )
    if torch.compiler.is_compiling():
        torch.ops.fi_backend.attention(kernel, *arguments)
    else:
        _attention(kernel, *arguments)


_PARAMETERS = [part.split() for part in _SCHEMA[: _SCHEMA.index(") -> ")].split(", ")]


def _attention(kernel: str, *arguments: Any) -> None:
    *inputs, out, lse = arguments
    try:
        _native(kernel)(*inputs, env.debug(), torch.get_num_threads(), out, lse)
    except (RuntimeError, TypeError) as error:
        # What the conversion to DLPack refuses, the native checks cannot name.
        for (kind, name), value in zip(_PARAMETERS, (kernel, *arguments), strict=True):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise ValueError(
                    f"{name}: expected host memory; got device {value.device}. Move it with .cpu()."
                ) from error
            if kind.startswith("Tensor") and not isinstance(value, (Tensor, type(None))):
                raise TypeError(f"{name}: expected a torch tensor; got {type(value).__name__}.") from error
        raise


ops.define(_SCHEMA, _attention, lambda *_: None)
