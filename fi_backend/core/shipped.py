# SPDX-License-Identifier: Apache-2.0
"""The instances of the CUDA attention template that `fi-backend build` compiles ahead of time.

`make test` compiles and loads six, which between them use every branch of the template; `make test-cuda-all`
takes all.

A module depends on dtypes, head dimensions and variant, not on the number of heads, the page size, the
window or sinks: the specs here stand for all that share their module.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

from fi_backend.core.spec import AttentionSpec

HALF_DTYPES = ("bfloat16", "float16")
STANDARD = "standard"
# What a variant's name sets in a spec; names are joined by "+". A soft cap and ALiBi share a module.
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        STANDARD: {},
        "soft-cap": {"logits_soft_cap": 50.0},
        "alibi": {"alibi": True},
        "custom-mask": {"custom_mask": True},
        "batch-invariant": {"batch_invariant": True},
    }
)


def instance(dtype: str, kv_dtype: str, head_dims: tuple[int, int], variant: str = STANDARD) -> AttentionSpec:
    """Return a spec whose module is the instance for these dtypes, (head_dim, head_dim_v) and variant.

    variant: names of VARIANTS joined by "+". Raises ValueError on an unknown name, TypeError on a dtype.
    """
    fields: dict[str, Any] = {}
    for name in variant.split("+"):
        if name not in VARIANTS:
            raise ValueError(f"variant: expected {', '.join(VARIANTS)} joined by '+'; got {variant!r}.")
        fields |= VARIANTS[name]
    return AttentionSpec(
        1, 1, head_dims[0], head_dim_v=head_dims[1], dtype=dtype, kv_dtype=kv_dtype, **fields
    )


def variant_of(spec: AttentionSpec) -> str:
    """Return the name of the variant whose module `spec` runs."""
    active = {
        "soft-cap": spec.logits_soft_cap > 0 or spec.alibi,
        "custom-mask": spec.custom_mask,
        "batch-invariant": spec.batch_invariant,
    }
    return "+".join(name for name, wanted in active.items() if wanted) or STANDARD


def build_options(spec: AttentionSpec) -> str:
    """Return the options of `fi-backend build` that name the module of `spec`."""
    dims = str(spec.head_dim) if spec.head_dim == spec.head_dim_v else f"{spec.head_dim}x{spec.head_dim_v}"
    return f"--dtype {spec.dtype} --kv-dtype {spec.kv_dtype} --head-dim {dims} --variant {variant_of(spec)}"


def shipped() -> tuple[AttentionSpec, ...]:
    """Return the shipped instances, at most 40: what common models use, in both half precisions."""
    dims = [(size, size) for size in (64, 80, 96, 112, 128, 192, 256)]
    found = [instance(dtype, dtype, each) for dtype, each in product(HALF_DTYPES, [*dims, (192, 128)])]
    for dtype in HALF_DTYPES:
        found += [instance(dtype, "float8_e4m3fn", (size, size)) for size in (64, 128, 256)]
        found.append(instance(dtype, "float8_e5m2", (128, 128)))
        # ALiBi of BLOOM and MPT, the soft caps of Gemma 2 and Grok.
        found += [instance(dtype, dtype, (size, size), "soft-cap") for size in (64, 128, 256)]
        found += [instance(dtype, dtype, (size, size), "custom-mask") for size in (64, 128)]
        found += [instance(dtype, dtype, (size, size), "batch-invariant") for size in (64, 128)]
    return tuple(found)
