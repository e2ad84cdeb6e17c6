# SPDX-License-Identifier: Apache-2.0
"""Which specs the options of a command name, and which of their modules the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from fi_backend import env
from fi_backend.cli.shell import InputError
from fi_backend.core.jit import ModuleSpec, cache
from fi_backend.core.jit.locate import locate
from fi_backend.core.shipped import HALF_DTYPES, STANDARD, instance, shipped, variant_of
from fi_backend.core.spec import AttentionSpec

SAME = "auto"
DEFAULT_DTYPES = ("bfloat16", "float16", "float32")


def cpu_specs(dtypes: Sequence[str], kv_dtypes: Sequence[str]) -> list[AttentionSpec]:
    """Return specs for queries of `dtypes` over caches of `kv_dtypes` ("auto": the query's own)."""
    # A module of the CPU serves all head dimensions and variants.
    pairs = product(dtypes or DEFAULT_DTYPES, kv_dtypes or [SAME])
    return [instance(dtype, _kv(dtype, kv_dtype), (64, 64)) for dtype, kv_dtype in pairs]


def cuda_specs(
    dtypes: Sequence[str],
    kv_dtypes: Sequence[str],
    head_dims: Sequence[tuple[int, int]],
    variants: Sequence[str],
) -> list[AttentionSpec]:
    """Return the instances that the options name; an empty sequence stands for an option not given.

    With head dimensions: all combinations, with the defaults of bf16 and fp16, the query's dtype for the
    cache, and the standard variant. Without: the shipped instances that match the other options.
    Raises InputError if nothing matches, ValueError on an unknown variant.
    """
    if head_dims:
        options = product(dtypes or HALF_DTYPES, kv_dtypes or [SAME], head_dims, variants or [STANDARD])
        return [instance(dtype, _kv(dtype, kv), dims, variant) for dtype, kv, dims, variant in options]
    wanted = {variant_of(instance("bfloat16", "bfloat16", (64, 64), variant)) for variant in variants}
    found = [
        spec
        for spec in shipped()
        if (not dtypes or spec.dtype in dtypes)
        and (not kv_dtypes or spec.kv_dtype in {_kv(spec.dtype, kv) for kv in kv_dtypes})
        and (not variants or variant_of(spec) in wanted)
    ]
    if not found:
        raise InputError("no shipped instance matches these options; add --head-dim to compile another one")
    return found


def cached_folder(spec: ModuleSpec, folder: Path | None = None) -> Path | None:
    """Return the folder of a module that is ready to be loaded, or None if it has to be compiled first."""
    return locate(spec, folder or env.cache_dir()).ready


def cached_modules(folder: Path) -> list[Path]:
    """Return the module folders in a cache, whatever version of the sources they were made from."""
    return sorted(
        path for path in folder.glob("*-*") if not path.name.startswith(".") and cache.is_built(path)
    )


def _kv(dtype: str, kv_dtype: str) -> str:
    return dtype if kv_dtype == SAME else kv_dtype
