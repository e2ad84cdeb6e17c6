# SPDX-License-Identifier: Apache-2.0
"""An attention engine for LLM serving, and the plug-ins that put it under vLLM and SGLang.

Importing this package imports neither torch nor an engine: public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fi_backend.errors import BuildError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from fi_backend import arrays as arrays
    from fi_backend.core.append import append_kv
    from fi_backend.core.attention import BatchAttention
    from fi_backend.core.block_selection import BlockSelection
    from fi_backend.core.block_sparse import BlockSparse
    from fi_backend.core.block_sparse_attention import BlockSparseAttention
    from fi_backend.core.head_pages import HeadPages
    from fi_backend.core.merge import merge_state, merge_states
    from fi_backend.core.page_table import PageTable
    from fi_backend.core.plan import Plan
    from fi_backend.core.spec import AttentionSpec
    from fi_backend.core.variant import AttentionVariant, TensorParam

__version__ = "0.1.0"

_LAZY = {
    "AttentionSpec": "fi_backend.core.spec",
    "AttentionVariant": "fi_backend.core.variant",
    "BatchAttention": "fi_backend.core.attention",
    "BlockSelection": "fi_backend.core.block_selection",
    "BlockSparse": "fi_backend.core.block_sparse",
    "BlockSparseAttention": "fi_backend.core.block_sparse_attention",
    "HeadPages": "fi_backend.core.head_pages",
    "PageTable": "fi_backend.core.page_table",
    "Plan": "fi_backend.core.plan",
    "TensorParam": "fi_backend.core.variant",
    "append_kv": "fi_backend.core.append",
    "merge_state": "fi_backend.core.merge",
    "merge_states": "fi_backend.core.merge",
}

__all__ = [
    "AttentionSpec",
    "AttentionVariant",
    "BatchAttention",
    "BlockSelection",
    "BlockSparse",
    "BlockSparseAttention",
    "BuildError",
    "HeadPages",
    "PageTable",
    "Plan",
    "PlanError",
    "TensorParam",
    "UnsupportedError",
    "append_kv",
    "merge_state",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if name == "arrays":  # a module of its own, for arrays of other libraries
        return importlib.import_module("fi_backend.arrays")
    if (module := _LAZY.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "arrays"})
