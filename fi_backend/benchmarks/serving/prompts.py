# SPDX-License-Identifier: Apache-2.0
"""Prompts of random token ids, equal where the trace says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fi_backend.benchmarks.serving.arrivals import Arrival

# The last ids of a large vocabulary are special tokens; small ones here are bytes.
_SPECIAL = 300
_BYTES = 256
_SHARED, _OWN = 0, 1


class Prompts:
    """Draws token ids from seeds.

    vocabulary: size of the model's. salt: part of every seed; another salt gives other tokens for the same
    trace, so that a server which has served one run cannot have cached anything of the next.
    """

    def __init__(self, vocabulary: int, salt: Sequence[int]) -> None:
        if vocabulary < 2:
            raise ValueError(f"vocabulary: expected at least 2 token ids; got {vocabulary}.")
        self._ids = vocabulary - _SPECIAL if vocabulary > 2 * _SPECIAL else min(vocabulary, _BYTES)
        self._salt = list(salt)

    def prefix(self, blocks: Iterable[tuple[int, int]]) -> list[int]:
        """Return the tokens of blocks given as (id, tokens)."""
        return [token for block, tokens in blocks for token in self._draw(_SHARED, block, tokens)]

    def prompt(self, arrival: Arrival, index: int) -> list[int]:
        """Return the prompt of request `index`: its prefix, then tokens of its own."""
        shared = self.prefix(arrival.prefix)[: arrival.prompt]
        return [*shared, *self._draw(_OWN, index, arrival.prompt - len(shared))]

    def _draw(self, kind: int, key: int, count: int) -> list[int]:
        rng = np.random.default_rng([*self._salt, kind, key])
        drawn: list[int] = rng.integers(self._ids, size=count).tolist()
        return drawn
