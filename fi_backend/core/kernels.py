# SPDX-License-Identifier: Apache-2.0
"""The native attention kernels: which module serves a spec, and the call into it.

Eager code calls the native function directly; under torch.compile the same call goes through the
operator ``fi_backend::attention`` (a dispatcher call costs about 3 us, the direct one under 1 us).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.core import jit, ops
from fi_backend.core.custom_mask import PackedMask
from fi_backend.core.jit.arch import cuda_arch, shared_kib
from fi_backend.core.page_table import PageTable
from fi_backend.core.shipped import build_options
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant
from fi_backend.core.variant_args import VariantValues
from fi_backend.core.variant_source import digest, explain, variant_module
from fi_backend.errors import BuildError

OPS_MODULE = jit.ModuleSpec(
    name="cpu_ops", sources=("cpu/append.cc", "cpu/merge.cc", "cpu/pack_mask.cc", "bind/cpu_ops.cc")
)

_SCHEMA = (
    "attention(str kernel, Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor? indices, "
    "Tensor row_begin, Tensor row_end, Tensor kv_lens, int index_step, int index_divisor, int page_size, "
    "int num_pages, Tensor(a!) plan, Tensor capacity, Tensor(b!) workspace, float scale, Tensor k_scale, "
    "Tensor v_scale, bool causal, int window_left, float soft_cap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? mask_begin, Tensor? mask_kv_len, int mask_heads, int num_ctas, "
    "Tensor(c!) out, Tensor(d!)? lse) -> ()"
)


def attention_module(spec: AttentionSpec, device: str | torch.device = "cpu") -> jit.ModuleSpec:
    """The module that runs `spec` on `device`; on CUDA one for each (spec, variant, architecture)."""
    if torch.device(device).type == "cuda":
        return cuda_attention_module(spec, cuda_arch(device))
    return jit.ModuleSpec(
        name=f"cpu_attention_{spec.dtype}_{spec.kv_dtype}",
        sources=("cpu/attention.cc", "cpu/attention_check.cc", "bind/cpu_attention.cc"),
        defines=(("FI_Q_DTYPE", spec.dtype), ("FI_KV_DTYPE", spec.kv_dtype)),
        recipe=f"--dtype {spec.dtype} --kv-dtype {spec.kv_dtype}",
    )


def cuda_attention_module(spec: AttentionSpec, arch: str) -> jit.ModuleSpec:
    """The CUDA module that runs `spec` on the target `arch`, such as "sm_90a"."""
    # The plain kernel folds the scale into the exponent, which needs a positive one.
    transform = spec.alibi or spec.logits_soft_cap > 0 or spec.scale <= 0
    parts = [spec.dtype, spec.kv_dtype, f"{spec.head_dim}x{spec.head_dim_v}"]
    parts += ["transform"] * transform + ["mask"] * spec.custom_mask + ["invariant"] * spec.batch_invariant
    return jit.ModuleSpec(
        name="_".join(("cuda_attention", *parts)),
        sources=("sm80/attention.cu", "bind/cuda_attention.cc"),
        defines=(
            ("FI_Q_DTYPE", spec.dtype),
            ("FI_KV_DTYPE", spec.kv_dtype),
            ("FI_HEAD_DIM", str(spec.head_dim)),
            ("FI_HEAD_DIM_V", str(spec.head_dim_v)),
            ("FI_INVARIANT", str(int(spec.batch_invariant))),
            ("FI_LOGITS_TRANSFORM", str(int(transform))),
            ("FI_LOGITS_MASK", str(int(spec.custom_mask))),
            ("FI_SHARED_KIB", str(shared_kib(arch))),
        ),
        arch=arch,
        recipe=build_options(spec),
    )


# Operators carry strings only: under torch.compile a kernel is known by this name.
_kernels: dict[str, Any] = {}
_ready: set[tuple[str, torch.device]] = set()


def attention_key(spec: AttentionSpec, device: torch.device, variant: AttentionVariant | None = None) -> str:
    """Build or load the module for `spec` and return the name that run_attention() knows it by.

    Raises BuildError; where a variant does not compile, with the lines of its bodies.
    """
    module = attention_module(spec, device)
    key = f"{module.name}@{module.arch}"
    if variant is not None:
        module = variant_module(module, variant)
        key = f"{module.name}@{module.arch}@{digest(module)}"
    if (key, device) not in _ready:
        try:
            native = jit.load(module)
        except BuildError as error:
            if variant is None:
                raise
            raise explain(variant, error) from None
        _kernels[key] = native.run
        if device.type == "cuda":
            native.prepare(torch.empty(0, device=device))  # on each device, and not in a capture
        _ready.add((key, device))
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
    num_ctas: int,
    variant: VariantValues | None = None,
) -> None:
    """Run a planned step; arguments as in BatchAttention.run() and .plan(); num_ctas: the grid on CUDA.

    variant: the arguments of the variant that `kernel` was compiled with.

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
        1 if mask is None else mask.num_heads,
        num_ctas,
        out,
        lse,
    )
    if torch.compiler.is_compiling():
        if variant is None:
            torch.ops.fi_backend.attention(kernel, *arguments)
        else:
            torch.ops.fi_backend.variant_attention(kernel, *arguments, *variant)
    elif variant is None:
        _attention(kernel, *arguments)
    else:
        _variant_attention(kernel, *arguments, *variant)


_PARAMETERS = [part.split() for part in _SCHEMA[: _SCHEMA.index(") -> ")].split(", ")]
_PLAN = [name for _, name in _PARAMETERS[1:]].index("plan")


def _variant_attention(kernel: str, *arguments: Any) -> None:
    *common, tensors, scalars = arguments
    _attention(kernel, *common, values=([*tensors, *scalars],))


def _attention(kernel: str, *arguments: Any, values: tuple[Any, ...] = ()) -> None:
    *inputs, num_ctas, out, lse = arguments
    device = inputs[_PLAN].device  # ours, unlike the other tensors
    try:
        if device.type == "cuda":
            _kernels[kernel](*inputs, num_ctas, out, lse, *values)
        else:
            _kernels[kernel](*inputs, env.debug(), torch.get_num_threads(), out, lse, *values)
    except (RuntimeError, TypeError) as error:
        # What the conversion to DLPack refuses, the native checks cannot name.
        for (kind, name), value in zip(_PARAMETERS, (kernel, *arguments), strict=True):
            if not kind.startswith("Tensor"):
                continue
            if not isinstance(value, (Tensor, type(None))):
                raise TypeError(f"{name}: expected a torch tensor; got {type(value).__name__}.") from error
            if isinstance(value, Tensor) and name != "capacity" and value.device != device:
                place = "host memory" if device.type == "cpu" else str(device)
                raise ValueError(
                    f"{name}: expected a tensor in {place}; got one in {value.device}. Move it with .to()."
                ) from error
        raise


ops.define(_SCHEMA, _attention, lambda *_: None)
ops.define(
    _SCHEMA.replace("attention(", "variant_attention(", 1).replace(
        ") -> ()", ", Tensor?[] variant_tensors, float[] variant_scalars) -> ()"
    ),
    _variant_attention,
    lambda *_: None,
)
