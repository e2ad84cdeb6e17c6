# SPDX-License-Identifier: Apache-2.0
"""Attention in which a key's weight falls with a power of its distance to the query."""

from __future__ import annotations

from collections.abc import Sequence

from fi_backend import AttentionVariant, TensorParam
from fi_backend.hooks import AttentionLayer, LayerVariant, hookimpl

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


@hookimpl
def fi_backend_layer_variant(layer: AttentionLayer) -> LayerVariant | None:
    """Under an engine: powers from 0 to `strength` over the heads of the model, in the layers asked for."""
    if layer.variant != RECENCY.name:
        return None
    import torch

    options = {"strength": 1.0, "layers": None, **layer.variant_args}
    if unknown := sorted(set(options) - {"strength", "layers"}):
        raise ValueError(f"recency: expected strength and layers; got {unknown[0]!r}.")
    if options["layers"] is not None and layer.index not in options["layers"]:
        return LayerVariant(None)
    rank, ranks = layer.tensor_parallel
    # While an engine builds a model, its dtype is the default one.
    kind = {"dtype": torch.float32, "device": layer.device}
    powers = torch.linspace(0, options["strength"], ranks * layer.spec.num_qo_heads, **kind)
    return LayerVariant(RECENCY, {"power": powers.chunk(ranks)[rank]})
