# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode with the variant that the installed package adds, compared with its definition."""

from __future__ import annotations

import torch

from fi_backend import AttentionSpec, BatchAttention, PageTable


def main() -> None:
    """Run on the CPU and print the largest error."""
    torch.manual_seed(0)
    q_lens, kv_lens, page_size = (5, 1), (40, 70), 16
    spec = AttentionSpec(4, 2, 32, dtype="float32", page_size=page_size)
    attention = BatchAttention(spec, max_requests=2, max_tokens=6, max_kv_len=80, variant="recency")
    q = torch.randn(6, 4, 32)
    k_cache, v_cache = torch.randn(2, 10, page_size, 2, 32)
    pages = torch.randperm(10).int().reshape(2, 5)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    attention.plan(
        torch.tensor([0, 5, 6], dtype=torch.int32),
        PageTable.from_block_table(pages, lengths, page_size=page_size),
    )
    power = torch.tensor([0.0, 0.5, 1.0, 2.0])
    out = attention.run(q, k_cache, v_cache, variant_args={"power": power})

    error, first = 0.0, 0
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        k, v = (cache[pages[row].long()].flatten(0, 1)[:kv_len].double() for cache in (k_cache, v_cache))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        distance = (torch.arange(q_len) + kv_len - q_len)[:, None] - torch.arange(kv_len)
        logits = torch.einsum("qhd,khd->hqk", q[first : first + q_len].double(), k) * spec.scale
        logits = logits - power.double()[:, None, None] * (distance.clamp(min=0) + 1).double().log()
        weights = logits.masked_fill(distance < 0, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v)
        error = max(error, float((out[first : first + q_len] - expected).abs().max()))
        first += q_len
    print(f"largest error: {error:.1e}")
    if not error < 1e-5:
        raise SystemExit("the variant does not compute what it says")


if __name__ == "__main__":
    main()
