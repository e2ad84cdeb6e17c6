# SPDX-License-Identifier: Apache-2.0
"""Caches quantised by channel: a scale for each element of a head, and an offset of values."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant, TensorParam

CHANNEL_SCALES = AttentionVariant(
    name="channel_scales",
    params={
        "key_scale": TensorParam("float32", ("num_kv_heads", "head_dim")),
        "value_scale": TensorParam("float32", ("num_kv_heads", "head_dim_v")),
        "value_offset": TensorParam("float32", ("num_kv_heads", "head_dim_v"), optional=True),
    },
    vectorized=True,
    query_transform="return x[d] * params.key_scale(kv_head_idx, d);",
    value_transform="""
      return x[d] * params.value_scale(kv_head_idx, d) + params.value_offset(kv_head_idx, d);
    """,
)
"""k * key_scale and v * value_scale + value_offset; k and v as run() dequantises them by k_scale and v_scale.

key_scale: float32 [num_kv_heads, head_dim]. value_scale: float32 [num_kv_heads, head_dim_v]. value_offset:
the same, by default none. Scales of keys act on the queries, which is cheaper; offsets of keys are not there,
for they move all logits of a row alike. Values change before they are weighed: beside a sink, weights do not
add up to one."""
