# SPDX-License-Identifier: Apache-2.0
"""Attention in which a key's weight falls with a power of its distance to the query."""

from __future__ import annotations

from collections.abc import Sequence

from fi_backend import AttentionVariant, TensorParam
from fi_backend.hooks import hookimpl

RECENCY = AttentionVariant(
    name="recency",
    params={"power": TensorParam("float32", ("num_qo_heads",))},
    vectorized=True,
    logits_transform="""
        const auto distance = max(to_float(q_pos - kv_idx), 0.0f);
        return logit - params.power[qo_head_idx] * log(distance + 1.0f);
    """,
)
"""weight ~ exp(scale * q . k) / (1 + distance)^power[head]. power: float32 [num_qo_heads]."""


@hookimpl
def fi_backend_attention_variants() -> Sequence[AttentionVariant]:
    """Make the variant known by its name."""
    return (RECENCY,)
