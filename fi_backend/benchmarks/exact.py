# SPDX-License-Identifier: Apache-2.0
"""Causal attention in float64, to hold every measured implementation against in the same run."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.benchmarks.peers import Problem


def exact_attention(problem: Problem, layer: int) -> Tensor:
    """Return float64 [tokens, num_qo_heads, head_dim], request by request and KV head by KV head."""
    spec = problem.spec
    key, value = problem.layers[layer]
    out = torch.zeros(problem.q.shape, dtype=torch.float64)
    for request, kv_len in enumerate(problem.kv_lens.tolist()):
        begin, end = problem.qo_indptr[request : request + 2].tolist()
        pages = problem.block_table[request, : -(-kv_len // spec.page_size)].long()
        hidden = torch.ones(end - begin, kv_len, dtype=torch.bool).triu(kv_len - (end - begin) + 1)
        for head in range(spec.num_kv_heads):
            k = key[pages, :, head].reshape(-1, spec.head_dim)[:kv_len].double()
            v = value[pages, :, head].reshape(-1, spec.head_dim)[:kv_len].double()
            for group in range(spec.group_size):
                qo_head = head * spec.group_size + group
                logits = problem.q[begin:end, qo_head].double() @ k.T * spec.scale
                out[begin:end, qo_head] = logits.masked_fill_(hidden, -torch.inf).softmax(1) @ v
    return out
