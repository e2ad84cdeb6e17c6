# SPDX-License-Identifier: Apache-2.0
"""Which native modules there are for which dtypes, and which of them the cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fi_backend import env
from fi_backend.core.jit import ModuleSpec, cache

SAME = "auto"
DEFAULT_DTYPES = ("bfloat16", "float16", "float32")


def cpu_modules(dtypes: Sequence[str], kv_dtypes: Sequence[str]) -> list[ModuleSpec]:
    """Return the modules that serve queries of `dtypes` over caches of `kv_dtypes` on a CPU.

    A KV dtype of "auto" is the query's own.
    """
    # Imported here: the core needs torch, and the command line has to work where it is missing.
    from fi_backend.core import kernels, planner

    specs = [planner.MODULE, kernels.OPS_MODULE]
    for dtype in dtypes:
        for kv_dtype in kv_dtypes:
            specs.append(kernels.attention_module(dtype, dtype if kv_dtype == SAME else kv_dtype))
    return list(dict.fromkeys(specs))


def cached_folder(spec: ModuleSpec) -> Path | None:
    """Return the folder of a module that is ready to be loaded, or None if it has to be compiled first."""
    folder = cache.module_folder(spec, env.cache_dir())
    return folder if cache.is_built(folder) else None


def cached_modules(folder: Path) -> list[Path]:
    """Return the module folders in a cache, whatever version of the sources they were made from."""
    return sorted(
        path for path in folder.glob("*-*") if not path.name.startswith(".") and cache.is_built(path)
    )
