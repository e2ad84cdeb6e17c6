# SPDX-License-Identifier: Apache-2.0
"""Page tables of 256 decode steps, by what their requests share: what detection on a GPU is measured with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from plan_cases import COSTS

from fi_backend.core.planner import Limits, Planner
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

BATCH = 256
PAGE = 16


def serving_planner(max_kv_len: int) -> Planner:
    return Planner(
        AttentionSpec(32, 8, 128, page_size=PAGE),
        Limits(BATCH, 8192, max_kv_len),
        num_ctas=132,
        costs=COSTS["gpu"],
        tiles=(16, 128),
        sharing=SharingLimits.for_limits(BATCH, 8192),
    )


def nothing(pages: int) -> np.ndarray:
    return np.arange(BATCH * pages, dtype=np.int32).reshape(BATCH, pages)


def one_prompt(pages: int) -> np.ndarray:
    table = nothing(pages)
    table[:, : pages - 8] = table[0, : pages - 8]
    return table


def groups(pages: int) -> np.ndarray:
    """Half of the pages are a prompt of all, a quarter one of 32 groups, whose requests come in turn."""
    table = nothing(pages)
    table[:, : pages // 2] = table[0, : pages // 2]
    for g in range(32):
        table[g::32, pages // 2 : pages * 3 // 4] = table[g, pages // 2 : pages * 3 // 4]
    return table


def four_levels(pages: int) -> np.ndarray:
    """All, 4 groups, 16 and 64 of them, at each fifth of the pages."""
    table = nothing(pages)
    for depth, count in enumerate((1, 4, 16, 64)):
        begin, end = depth * pages // 5, (depth + 1) * pages // 5
        for g in range(count):
            table[g::count, begin:end] = table[g, begin:end]
    return table


def pairs(pages: int) -> np.ndarray:
    table = nothing(pages)
    table[BATCH // 2 :, : pages - 8] = table[: BATCH // 2, : pages - 8]
    return table


SHAPES: dict[str, Callable[[int], np.ndarray]] = {
    "nothing": nothing,
    "one prompt": one_prompt,
    "groups": groups,
    "four levels": four_levels,
    "pairs": pairs,
}
