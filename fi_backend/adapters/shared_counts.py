# SPDX-License-Identifier: Apache-2.0
"""Counts and reports what shared prefixes save under an engine, alike for all engines."""

from __future__ import annotations

import logging
from functools import cache

import torch

from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import (
    KV_BYTES_SAVED,
    KV_TOKENS_SAVED,
    PREFIX_NODES,
    SHARED_PLANS,
    counters,
)
from fi_backend.core.spec import AttentionSpec


def count_shared(attention: BatchAttention, layers: int, log: logging.Logger) -> None:
    """Count what has become known of the plans of `attention`; called once after each of them.

    layers: how many run with each plan. log: gets one line when prefixes are shared for the first time.
    """
    if attention.tally is None:
        return
    saved = attention.tally.take()
    if not saved.plans:
        return
    count = counters()
    count.add(SHARED_PLANS, saved.plans)
    count.add(PREFIX_NODES, saved.nodes)
    count.add(KV_TOKENS_SAVED, saved.tokens)
    count.add(KV_BYTES_SAVED, saved.tokens * layers * _bytes_a_token(attention.spec))
    _report(log, saved.tokens, saved.plans)


@cache
def _bytes_a_token(spec: AttentionSpec) -> int:
    """K and V of one token in one layer."""
    size: int = getattr(torch, spec.kv_dtype).itemsize
    return spec.num_kv_heads * (spec.head_dim + spec.head_dim_v) * size


_reported = False


def _report(log: logging.Logger, tokens: int, plans: int) -> None:
    global _reported
    if not _reported:
        _reported = True
        log.info(
            "requests share prefixes, which are read once: %d KV tokens a layer less in %d steps so far. "
            "`fi-backend stats` counts on; FI_BACKEND_WITHOUT=sharing turns it off.",
            tokens,
            plans,
        )
