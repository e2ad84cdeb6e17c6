# SPDX-License-Identifier: Apache-2.0
"""An attention engine for LLM serving, and the plug-ins that put it under vLLM and SGLang.

Importing this package imports neither torch nor an engine: public names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import BuildError, PlanError, UnsupportedError

if TYPE_CHECKING:
    from .core.append import append_kv
    from .core.attention import BatchAttention
    from .core.block_sparse import BlockSparse
    from .core.merge import merge_state, merge_states
    from .core.page_table import PageTable
    from .core.plan import Plan
    from .core.spec import AttentionSpec

__version__ = "0.1.0"

_LAZY = {
    "AttentionSpec": ".core.spec",
    "BatchAttention": ".core.attention",
    "BlockSparse": ".core.block_sparse",
    "PageTable": ".core.page_table",
    "Plan": ".core.plan",
    "append_kv": ".core.append",
    "merge_state": ".core.merge",
    "merge_states": ".core.merge",
}

__all__ = [
    "AttentionSpec",
    "BatchAttention",
    "BlockSparse",
    "BuildError",
    "PageTable",
    "Plan",
    "PlanError",
    "UnsupportedError",
    "append_kv",
    "merge_state",
    "merge_states",
]


def __getattr__(name: str) -> Any:
    if (module := _LAZY.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module, __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
