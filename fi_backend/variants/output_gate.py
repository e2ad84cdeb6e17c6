# SPDX-License-Identifier: Apache-2.0
"""What is done to the output: a scale for each head, a gate for each element."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant, TensorParam

OUTPUT_SCALE = AttentionVariant(
    name="output_scale",
    params={"scale": TensorParam("float32", ("num_qo_heads",))},
    finish="return params.scale[qo_head_idx];",
)
"""o * scale[head]. scale: float32 [num_qo_heads]."""

OUTPUT_GATE = AttentionVariant(
    name="output_gate",
    params={"gate": TensorParam("bfloat16", ("tokens", "num_qo_heads", "head_dim_v"))},
    output_transform="return o * sigmoid(params.gate(token_idx, qo_head_idx, d));",
)
"""o * sigmoid(gate). gate: bfloat16 [tokens, num_qo_heads, head_dim_v], a row for each row of q."""
