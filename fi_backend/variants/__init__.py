# SPDX-License-Identifier: Apache-2.0
"""The variants of attention that this package ships, made with nothing but what a user's variant has."""

from __future__ import annotations

from collections.abc import Sequence

from fi_backend.core.variant import AttentionVariant
from fi_backend.hooks import hookimpl
from fi_backend.variants.biases import ALIBI, LOGIT_BIAS, SOFT_CAP
from fi_backend.variants.channel_scales import CHANNEL_SCALES
from fi_backend.variants.flash_sigmoid import FLASH_SIGMOID
from fi_backend.variants.output_gate import OUTPUT_GATE, OUTPUT_SCALE
from fi_backend.variants.qk_norm import QK_NORM
from fi_backend.variants.rope import ROPE, ROPE_INTERLEAVED, Llama31Scaling, rope, rope_frequencies
from fi_backend.variants.windows import SINK_WINDOW, SLIDING_WINDOW

__all__ = [
    "ALIBI",
    "CHANNEL_SCALES",
    "FLASH_SIGMOID",
    "LOGIT_BIAS",
    "OUTPUT_GATE",
    "OUTPUT_SCALE",
    "QK_NORM",
    "ROPE",
    "ROPE_INTERLEAVED",
    "SINK_WINDOW",
    "SLIDING_WINDOW",
    "SOFT_CAP",
    "Llama31Scaling",
    "rope",
    "rope_frequencies",
]


@hookimpl
def fi_backend_attention_variants() -> Sequence[AttentionVariant]:
    """Register them by name, as any package does."""
    return (
        ALIBI,
        CHANNEL_SCALES,
        FLASH_SIGMOID,
        LOGIT_BIAS,
        OUTPUT_GATE,
        OUTPUT_SCALE,
        QK_NORM,
        ROPE,
        ROPE_INTERLEAVED,
        SINK_WINDOW,
        SLIDING_WINDOW,
        SOFT_CAP,
    )
