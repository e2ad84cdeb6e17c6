# SPDX-License-Identifier: Apache-2.0
"""The call of an attention kernel on torch tensors.

Eager code calls the native function directly; under torch.compile the same call goes through the
operator ``fi_backend::attention`` (a dispatcher call costs about 3 us, the direct one under 1 us).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.core import kernels, ops
from fi_backend.core.variant_args import VariantValues

_SCHEMA = (
    "attention(str kernel, Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor? indices, "
    "Tensor row_begin, Tensor row_end, Tensor kv_lens, int index_step, int index_divisor, int page_size, "
    "int num_pages, Tensor(a!) plan, Tensor capacity, Tensor(b!) workspace, float scale, Tensor k_scale, "
    "Tensor v_scale, bool causal, int window_left, float soft_cap, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? mask, Tensor? mask_begin, Tensor? mask_kv_len, int mask_heads, int num_ctas, "
    "Tensor(c!) out, Tensor(d!)? lse) -> ()"
)


def run_attention(kernel: str, arguments: tuple[Any, ...], variant: VariantValues | None = None) -> None:
    """Run a planned step.

    kernel: the name that kernels.attention_key() gave it. arguments: those of kernels.arguments(). variant:
    the arguments of the variant that `kernel` was compiled with.

    Raises ValueError or TypeError naming the argument before anything is written.
    """
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
            kernels.function(kernel)(*inputs, num_ctas, out, lse, *values)
        else:
            kernels.function(kernel)(*inputs, env.debug(), torch.get_num_threads(), out, lse, *values)
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
