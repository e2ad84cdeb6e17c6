# SPDX-License-Identifier: Apache-2.0
"""What is done to logits: soft cap, ALiBi, a bias read from a tensor."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant, TensorParam

SOFT_CAP = AttentionVariant(
    name="soft_cap",
    params={"cap": "float32"},
    vectorized=True,
    logits_transform="return params.cap * tanh(logit * (1.0f / params.cap));",
)
"""cap * tanh(logit / cap). cap: > 0."""

ALIBI = AttentionVariant(
    name="alibi",
    params={"slopes": TensorParam("float32", ("num_qo_heads",))},
    vectorized=True,
    logits_transform="return logit + to_float(kv_idx - q_pos) * params.slopes[qo_head_idx];",
)
"""logit + slope[head] * (key position - query position). slopes: float32 [num_qo_heads]."""

LOGIT_BIAS = AttentionVariant(
    name="logit_bias",
    params={"bias": TensorParam("float32", ("num_qo_heads", "tokens", None))},
    vectorized=True,
    logits_transform="""
      const int token = attention.qo_indptr[batch_idx] + qo_idx;
      return logit + params.bias(qo_head_idx, token, kv_idx);
    """,
)
"""logit + bias[head, row of q, key position]. bias: float32 [num_qo_heads, tokens, keys]; 0 past its keys."""
