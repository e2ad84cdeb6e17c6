# SPDX-License-Identifier: Apache-2.0
"""Block tables of decode steps, by what their requests share: what detection of prefixes is measured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

BATCH = 256
PAGE = 16
_Table = npt.NDArray[np.int32]


def nothing(pages: int) -> _Table:
    """Return int32 [BATCH, pages] of pages that each belong to one request."""
    return np.arange(BATCH * pages, dtype=np.int32).reshape(BATCH, pages)


def one_prompt(pages: int) -> _Table:
    """Return a table in which all requests share all pages but the last eight."""
    table = nothing(pages)
    table[:, : pages - 8] = table[0, : pages - 8]
    return table


def groups(pages: int) -> _Table:
    """Half of the pages are a prompt of all, a quarter one of 32 groups, whose requests come in turn."""
    table = nothing(pages)
    table[:, : pages // 2] = table[0, : pages // 2]
    for g in range(32):
        table[g::32, pages // 2 : pages * 3 // 4] = table[g, pages // 2 : pages * 3 // 4]
    return table


def four_levels(pages: int) -> _Table:
    """All, 4 groups, 16 and 64 of them, at each fifth of the pages."""
    table = nothing(pages)
    for depth, count in enumerate((1, 4, 16, 64)):
        begin, end = depth * pages // 5, (depth + 1) * pages // 5
        for g in range(count):
            table[g::count, begin:end] = table[g, begin:end]
    return table


def pairs(pages: int) -> _Table:
    """Return a table in which request i and request i + BATCH / 2 share all pages but the last eight."""
    table = nothing(pages)
    table[BATCH // 2 :, : pages - 8] = table[: BATCH // 2, : pages - 8]
    return table


SHAPES: Mapping[str, Callable[[int], _Table]] = {
    "nothing": nothing,
    "one prompt": one_prompt,
    "groups": groups,
    "four levels": four_levels,
    "pairs": pairs,
}
"""By what is shared; each is given the pages of a request."""
