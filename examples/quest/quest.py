# SPDX-License-Identifier: Apache-2.0
"""Decoding over the pages that matter to a query, by bounds on their keys.

The idea is that of Quest (Tang et al., 2024, arXiv:2406.10774): a page keeps the least and the greatest value
of every element of its keys, from which follows how large a dot product with any of its keys can be. A
decoding query reads the pages of the largest bounds alone, each KV head its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fi_backend import AttentionSpec, BatchAttention, BlockSelection, HeadPages, PageTable
from fi_backend.core.head_pages import spec_of_head


class PageBounds:
    """The least and the greatest value of every element of the keys of each page.

    Tensors `low`, `high`: [num_pages + 1, num_kv_heads, head_dim]; the last page takes what belongs to none.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, device: torch.device | str = "cpu") -> None:
        shape = (num_pages + 1, spec.num_kv_heads, spec.head_dim)
        self.page_size, self.num_pages = spec.page_size, num_pages
        self.low = torch.full(shape, torch.inf, dtype=getattr(torch, spec.dtype), device=device)
        self.high = torch.full_like(self.low, -torch.inf)

    def append(self, keys: Tensor, slots: Tensor) -> None:
        """Take in the keys that append_kv() writes to these slots.

        keys: [tokens, num_kv_heads, head_dim]; slots: int64 [tokens], -1 for none. The first token of a page
        forgets what stood there before.
        """
        page = torch.where(slots >= 0, slots // self.page_size, self.num_pages)
        begun = torch.where(slots % self.page_size == 0, page, self.num_pages)
        self.low.index_fill_(0, begun, torch.inf)
        self.high.index_fill_(0, begun, -torch.inf)
        at = page[:, None, None].expand_as(keys)
        self.low.scatter_reduce_(0, at, keys, "amin")
        self.high.scatter_reduce_(0, at, keys, "amax")

    def largest_product(self, q: Tensor, block_table: Tensor) -> Tensor:
        """Return a bound of q . k over the keys of each page: [requests, num_qo_heads, blocks].

        q: [requests, num_qo_heads, head_dim]; block_table: int32 [requests, blocks]; what its unused entries
        give is meaningless.
        """
        pages = block_table.long().clamp(0, self.num_pages)
        requests, heads, dim = q.shape
        grouped = q.view(requests, self.low.shape[1], -1, dim)
        # An element of a query gives most with the greatest value of the key where it is positive, and with
        # the least one where it is negative.
        high, low = (bounds[pages].permute(0, 2, 3, 1) for bounds in (self.high, self.low))
        products = grouped.clamp(min=0) @ high + grouped.clamp(max=0) @ low
        return products.view(requests, heads, -1)


@dataclass(frozen=True)
class Choice:
    """What a step reads.

    scores: [requests, num_kv_heads, blocks], -inf where a request has no such block. blocks: int64 [requests,
    num_kv_heads, top], -1 where there are fewer. table: their rows of pages.
    """

    scores: Tensor
    blocks: Tensor
    table: PageTable


class QuestAttention:
    """Attention of decoding requests over the `top` pages of each KV head, the newest page among them.

    spec: the layer. max_requests: of one step. num_pages: of the caches. top: pages that a head reads, at
    least 1. device: where the tensors of a step lie.

    A step calls bounds.append() where it appends keys, then choose() and run() for each layer; layers have
    bounds of their own and may share the rest, since one plan serves them all (it decides the balance).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_requests: int,
        num_pages: int,
        top: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= top <= num_pages:
            raise ValueError(f"top: expected 1..{num_pages} pages; got {top}.")
        heads, of_head = spec.num_kv_heads, spec_of_head(spec, spec.num_kv_heads)
        self.spec, self.top = spec, top
        self.bounds = PageBounds(spec, num_pages, device)
        self.selection = BlockSelection(
            max_rows=max_requests, max_blocks=top, page_size=spec.page_size, num_heads=heads, device=device
        )
        self.attention = BatchAttention(
            of_head,
            max_requests=max_requests * heads,
            max_tokens=max_requests * heads,
            max_kv_len=self.selection.max_kv_len,
            device=device,
        )
        self._starts = torch.arange(max_requests * heads + 1, dtype=torch.int32, device=device)

    def choose(self, q: Tensor, block_table: Tensor, kv_lens: Tensor, pages: HeadPages) -> Choice:
        """Choose the pages of a step, whose keys have been appended.

        q: [requests, num_qo_heads, head_dim]; block_table: int32 [requests, blocks]; kv_lens: int32
        [requests]; pages: the caches.
        """
        requests, blocks = block_table.shape
        bound = self.bounds.largest_product(q, block_table).float()
        scores = bound.view(requests, self.spec.num_kv_heads, -1, blocks).amax(2)
        ends = kv_lens[:, None, None]
        begins = torch.arange(blocks, device=q.device) * self.spec.page_size
        scores = torch.where(begins + self.spec.page_size >= ends, torch.inf, scores)  # the newest page
        scores = torch.where(begins < ends, scores, -torch.inf)
        best = scores.topk(min(self.top, blocks), sorted=False)
        chosen = torch.where(best.values > -torch.inf, best.indices, -1)
        return Choice(scores, chosen, self.selection.fill_blocks(chosen, kv_lens, block_table, pages))

    def plan(self, choice: Choice) -> None:
        """Balance a step; every layer may choose for itself afterwards."""
        rows = choice.table.num_requests
        self.attention.plan(self._starts[: rows + 1], choice.table)

    def run(self, q: Tensor, pages: HeadPages, lse: Tensor | None = None) -> Tensor:
        """Attend over what was chosen last: [requests, num_qo_heads, head_dim_v]."""
        rows = q.shape[0] * self.spec.num_kv_heads
        by_head = None if lse is None else lse.view(rows, -1)
        out = self.attention.run(q.view(rows, -1, q.shape[2]), pages.k_pages, pages.v_pages, lse=by_head)
        return out.view(*q.shape[:2], -1)
