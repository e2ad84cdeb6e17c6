# SPDX-License-Identifier: Apache-2.0
"""The native attention kernels: which module serves a spec, and what its function is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_backend.core import jit
from fi_backend.core.jit.arch import cuda_arch, device_kind, shared_kib
from fi_backend.core.kernel_choice import CPU, SM90A, choose
from fi_backend.core.shipped import build_options
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant
from fi_backend.core.variant_source import digest, explain, variant_module
from fi_backend.errors import BuildError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fi_backend.core.custom_mask import PackedMask
    from fi_backend.core.page_table import PageTable

OPS_MODULE = jit.ModuleSpec(
    name="cpu_ops", sources=("cpu/append.cc", "cpu/merge.cc", "cpu/pack_mask.cc", "bind/cpu_ops.cc")
)


def attention_module(
    spec: AttentionSpec,
    device: str | torch.device = "cpu",
    variant: AttentionVariant | None = None,
    kernel: str | None = None,
) -> jit.ModuleSpec:
    """The module that runs `spec` on `device`; on CUDA one for each (spec, variant, architecture).

    variant: the one whose functors it will get (with_variant). kernel: a name of kernel_choice's instead of
    the best one. Raises ValueError as kernel_choice.choose() does.
    """
    if device_kind(device) == "cuda":
        return cuda_attention_module(spec, cuda_arch(device), variant, kernel)
    choose(spec, CPU, variant, name=kernel)
    return jit.ModuleSpec(
        name=f"cpu_attention_{spec.dtype}_{spec.kv_dtype}",
        sources=("cpu/attention.cc", "cpu/attention_check.cc", "bind/cpu_attention.cc"),
        defines=(("FI_Q_DTYPE", spec.dtype), ("FI_KV_DTYPE", spec.kv_dtype)),
        recipe=f"--dtype {spec.dtype} --kv-dtype {spec.kv_dtype}",
    )


def cuda_attention_module(
    spec: AttentionSpec, arch: str, variant: AttentionVariant | None = None, kernel: str | None = None
) -> jit.ModuleSpec:
    """The CUDA module that runs `spec` on the target `arch`, such as "sm_90a"; see attention_module()."""
    chosen = choose(spec, arch, variant, name=kernel)
    # The plain kernel folds the scale into the exponent, which needs a positive one.
    transform = spec.alibi or spec.logits_soft_cap > 0 or spec.scale <= 0
    parts = [spec.dtype, spec.kv_dtype, f"{spec.head_dim}x{spec.head_dim_v}"]
    parts += ["transform"] * transform + ["mask"] * spec.custom_mask + ["invariant"] * spec.batch_invariant
    parts += [chosen.name] * (chosen != choose(spec, arch))
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
            ("FI_SM90A", str(int(arch == SM90A))),
            ("FI_WGMMA", str(int(chosen.wgmma))),
        ),
        arch=arch,
        recipe=build_options(spec),
    )


def load_attention(module: jit.ModuleSpec, variant: AttentionVariant | None) -> Any:
    """Build or load a module; `variant`: the functors that it is compiled with.

    Raises BuildError; where a variant does not compile, with the lines of its bodies.
    """
    try:
        return jit.load(module)
    except BuildError as error:
        if variant is None:
            raise
        raise explain(variant, error) from None


def with_variant(module: jit.ModuleSpec, variant: AttentionVariant | None) -> jit.ModuleSpec:
    """Return the module of a spec, with the functors of a variant where there is one."""
    return module if variant is None else variant_module(module, variant)


# Operators carry strings only: under torch.compile a kernel is known by this name.
_kernels: dict[str, Any] = {}
_ready: set[tuple[str, torch.device]] = set()


def attention_key(
    spec: AttentionSpec,
    device: torch.device,
    variant: AttentionVariant | None = None,
    kernel: str | None = None,
) -> str:
    """Build or load the module for `spec` and return the name that function() knows it by.

    Raises BuildError; where a variant does not compile, with the lines of its bodies.
    """
    module = with_variant(attention_module(spec, device, variant, kernel), variant)
    key = f"{module.name}@{module.arch}"
    if variant is not None:
        key += f"@{digest(module)}"
    if (key, device) not in _ready:
        native = load_attention(module, variant)
        _kernels[key] = native.run
        if device.type == "cuda":
            import torch

            native.prepare(torch.empty(0, device=device))  # on each device, and not in a capture
        _ready.add((key, device))
    return key


def function(key: str) -> Any:
    """Return the native function that attention_key() gave a name."""
    return _kernels[key]


def arguments(
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
) -> tuple[Any, ...]:
    """Return the arguments of a module's `run`, as in BatchAttention.run() and .plan(), without a variant's.

    Arrays may be those of any library. num_ctas: the grid on CUDA.
    """
    pages = k_cache.shape[0] if k_cache.ndim == 4 else -(-k_cache.shape[0] // table.page_size)
    return (
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
