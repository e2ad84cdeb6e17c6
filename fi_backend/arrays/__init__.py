# SPDX-License-Identifier: Apache-2.0
"""The same kernels for NumPy, JAX, CuPy and torch arrays, taken and returned through DLPack.

Nothing here imports torch, nor any array library but NumPy: a library that made an array is there already.
Public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fi_backend.arrays.attention import BatchAttention
    from fi_backend.arrays.operators import append_kv, merge_state, merge_states
    from fi_backend.arrays.page_table import PageTable
    from fi_backend.core.planner import CostModel
    from fi_backend.core.prefix_forest import PrefixForest
    from fi_backend.core.sharing import SharingLimits
    from fi_backend.core.spec import AttentionSpec
    from fi_backend.core.variant import AttentionVariant, TensorParam

_LAZY = {
    "AttentionSpec": "fi_backend.core.spec",
    "AttentionVariant": "fi_backend.core.variant",
    "BatchAttention": "fi_backend.arrays.attention",
    "CostModel": "fi_backend.core.planner",
    "PageTable": "fi_backend.arrays.page_table",
    "PrefixForest": "fi_backend.core.prefix_forest",
    "SharingLimits": "fi_backend.core.sharing",
    "TensorParam": "fi_backend.core.variant",
    "append_kv": "fi_backend.arrays.operators",
    "merge_state": "fi_backend.arrays.operators",
    "merge_states": "fi_backend.arrays.operators",
}

__all__ = [
    "AttentionSpec",
    "AttentionVariant",
    "BatchAttention",
    "CostModel",
    "PageTable",
    "PrefixForest",
    "SharingLimits",
    "TensorParam",
    "append_kv",
    "merge_state",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if (module := _LAZY.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
