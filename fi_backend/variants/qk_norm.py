# SPDX-License-Identifier: Apache-2.0
"""QK norm: root mean square norms of queries and keys, learnt weights, over a cache of plain keys."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant, TensorParam

# The bodies of queries and keys are the same but for the names of the weights.
_RMS = """
  float sum = 0;
  FI_UNROLL_BY(8)
  for (int i = 0; i < x.size(); ++i) sum += x[i] * x[i];
  return rsqrt(sum / x.size() + params.eps);
"""

QK_NORM = AttentionVariant(
    name="qk_norm",
    params={
        "q_weight": TensorParam("float32", ("head_dim",)),
        "k_weight": TensorParam("float32", ("head_dim",)),
        "eps": "float32",
    },
    defaults={"eps": 1e-6},
    vectorized=True,
    query_reduce=_RMS,
    query_transform="return x[d] * reduced * params.q_weight[d];",
    key_reduce=_RMS.replace("float sum = 0", "F sum = F{}").replace("/ x.size()", "* (1.0f / x.size())"),
    key_transform="return x[d] * reduced * params.k_weight[d];",
)
"""x * weight / sqrt(mean(x^2) + eps) of queries and keys. q_weight, k_weight: float32 [head_dim]."""
