# SPDX-License-Identifier: Apache-2.0
"""A plug-in of SGLang for the tests: breaks fi, in the process that attends, as SABOTAGE_OF_FI says."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from engine_patches import SABOTAGE


def register() -> None:
    """Break what the variable names; SGLang calls this in each of its processes."""
    if name := os.environ.get("SABOTAGE_OF_FI"):
        BREAK[name]()


def _ignore_last_page() -> None:
    from fi_backend.core.page_table import PageTable

    original = PageTable.from_token_table

    def shortened(table: Any, rows: Any, kv_lens: Any, *, page_size: int) -> PageTable:
        return original(table, rows, (kv_lens - page_size).clamp_min(0), page_size=page_size)

    PageTable.from_token_table = shortened  # type: ignore[method-assign]


def _drop_appends() -> None:
    from fi_backend.core import append

    original = append._append_kv

    def lossy(key: Any, value: Any, slots: Any, *rest: Any) -> None:
        if slots.shape[0] > 64:
            original(key, value, slots, *rest)

    append._append_kv = lossy


def _shorten_items() -> None:
    SABOTAGE["shorten_items"]().__enter__()  # for as long as the process lives


def _compare_forests() -> None:
    """No sabotage: raise where the radix tree and the rows of the token table say different things."""
    import torch

    from fi_backend.adapters.sglang.layers import Layers
    from fi_backend.core.prefix_forest import PrefixForest, shareable
    from fi_backend.core.support import query_tiles

    original = Layers._forest

    def compared(self: Any, step: Any, kind: Any) -> Any:
        found, spec = original(self, step, kind), kind.spec
        if step.paths is None:
            return found
        tile = query_tiles(spec, "cpu")[1]
        limits = shareable(
            step.qo_indptr_host.diff(), step.kv_lens_host, spec.page_size, spec.group_size, tile
        )
        ends = torch.tensor([path[-1][1] if path else 0 for path in step.paths]).int()
        oracle = PrefixForest.from_page_table(step.tables[False], torch.minimum(limits, ends))
        got = ([], []) if found is None else (found.nodes.tolist(), found.members.tolist())
        if got != (oracle.nodes.tolist(), oracle.members.tolist()):
            raise RuntimeError(
                f"paths give {got}; rows give {oracle.nodes.tolist()}, {oracle.members.tolist()}"
            )
        return found

    Layers._forest = compared  # type: ignore[method-assign]


BREAK: dict[str, Callable[[], None]] = {
    "ignore_last_page": _ignore_last_page,
    "drop_appends": _drop_appends,
    "shorten_items": _shorten_items,
    "compare_forests": _compare_forests,
}
