# SPDX-License-Identifier: Apache-2.0
"""FlashSigmoid: every key weighs by the sigmoid of its logit, and no softmax divides."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant

FLASH_SIGMOID = AttentionVariant(
    name="flash_sigmoid",
    params={"bias": "float32"},
    defaults={"bias": 0.0},
    softmax=False,
    vectorized=True,
    logits_transform="return sigmoid(logit + params.bias);",
)
"""weight = sigmoid(scale * q . k + bias). bias: a number, often -log(number of keys)."""
