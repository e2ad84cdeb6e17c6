# SPDX-License-Identifier: Apache-2.0
"""Decode with a needle in the haystack: a third of the pages gives the answer of all of them.

python examples/quest/example.py
"""

from __future__ import annotations

import torch
from quest import QuestAttention

from fi_backend import AttentionSpec, BatchAttention, HeadPages, PageTable, append_kv

PAGE, TOP = 16, 32


def main() -> None:
    """Append the keys of two requests, choose, attend, and compare with attention over all pages."""
    torch.manual_seed(0)
    lens = torch.tensor([2000, 1234], dtype=torch.int32)
    spec = AttentionSpec(8, 2, 64, dtype="float32", page_size=PAGE)
    num_pages = 256
    k_cache, v_cache = torch.zeros(2, num_pages, PAGE, 2, 64)
    block_table = torch.randperm(num_pages).int().view(2, 128)
    quest = QuestAttention(spec, max_requests=2, num_pages=num_pages, top=TOP)

    q = torch.randn(2, 8, 64)
    for request, length in enumerate(lens.tolist()):
        keys, values = torch.randn(2, length, 2, 64)
        for head in range(2):  # what every query head of the group looks for
            keys[300 + 500 * head, head] = 6 * q[request, 4 * head : 4 * head + 4].sum(0)
        at = torch.arange(length)
        slots = block_table[request, at // PAGE].long() * PAGE + at % PAGE
        append_kv(keys, values, k_cache, v_cache, slots)
        quest.bounds.append(keys, slots)

    pages = HeadPages(k_cache, v_cache)
    choice = quest.choose(q, block_table, lens, pages)
    quest.plan(choice)
    out = quest.run(q, pages)

    dense = BatchAttention(spec, max_requests=2, max_tokens=2, max_kv_len=2048)
    dense.plan(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        PageTable.from_block_table(block_table, lens, page_size=PAGE),
    )
    expected = dense.run(q, k_cache, v_cache)
    found = True
    for head in range(2):
        needle = (300 + 500 * head) // PAGE
        both = all(needle in choice.blocks[request, head].tolist() for request in range(2))
        print(f"KV head {head}: page {needle} of the needle chosen by both requests: {both}")
        found = found and both
    read, total = int(choice.table.kv_lens.sum()), 2 * int(lens.sum())
    error = float((out - expected).abs().max())
    print(f"keys read: {read} of {total} ({read / total:.0%}); largest difference to dense: {error:.1e}")
    if not (found and error < 1e-3):
        raise SystemExit("the chosen pages do not hold the answer")


if __name__ == "__main__":
    main()
