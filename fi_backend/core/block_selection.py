# SPDX-License-Identifier: Apache-2.0
"""KV blocks chosen anew at every step or layer, as rows of pages at addresses that never move."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core.attention_checks import expect_tensor
from fi_backend.core.head_pages import HeadPages, PageSteps
from fi_backend.core.page_table import PageTable


class BlockSelection:
    """Which blocks of its KV tokens each row sees, row by row or head by head; filled in place.

    max_rows: requests, or blocks of query tokens. max_blocks: that a row may see. page_size: tokens of a
    block, a page of the cache. num_heads: heads that choose for themselves, num_kv_heads or num_qo_heads of
    the layer (default: one choice for all). device: where masks, lengths and caches lie. heads_first: the
    table has the rows of one head after those of another, in place of the heads of one row.

    Nothing waits for the device; a captured CUDA graph may fill, plan and run. Blocks are read in ascending
    order, whatever the order of the choice, as if they were neighbours: positions count chosen keys, so that
    windows and ALiBi are for specs without a choice (spec_of_head() refuses them).
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_blocks: int,
        page_size: int,
        num_heads: int = 1,
        device: torch.device | str = "cpu",
        heads_first: bool = False,
    ) -> None:
        sizes = {"max_rows": max_rows, "max_blocks": max_blocks, "page_size": page_size}
        for name, value in {**sizes, "num_heads": num_heads}.items():
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more; got {value}.")
        self.max_rows, self.max_blocks, self.num_heads = max_rows, max_blocks, num_heads
        self.page_size = page_size
        self._heads_first = heads_first
        # What is not chosen is written to a last column, which nobody reads.
        shape = (max_rows * num_heads, max_blocks + 1)
        self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        self._kv_lens = torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device)
        self._heads = torch.arange(num_heads, device=device).view(1, -1, 1)
        # Makes the row bounds, so that the first table may be filled inside a capture.
        PageTable.from_block_table(self._table[:, :max_blocks], self._kv_lens, page_size=page_size)

    @property
    def max_kv_len(self) -> int:
        """KV tokens that a row may see."""
        return self.max_blocks * self.page_size

    def fill_mask(
        self,
        mask: Tensor,
        kv_lens: Tensor,
        block_table: Tensor | None = None,
        pages: HeadPages | PageSteps | None = None,
    ) -> PageTable:
        """Choose the blocks whose bit is set; returns the rows of pages, at the same addresses every time.

        mask: bool [rows, blocks] or [rows, num_heads, blocks]; bits behind the end of a row's KV or of its
            block table count not.
        kv_lens: int32 [rows], KV tokens of the row's request. block_table: int32 [rows, blocks], the page of
            each block (default: block j is page j). pages: the caches by head; needed with num_heads > 1.

        A row that chooses more than max_blocks, or a page that is negative or not in the caches of `pages`,
        is an error on a CPU and gives NaN on CUDA. Raises ValueError or TypeError naming the argument.
        """
        expect_tensor("mask", mask)
        if mask.dtype is not torch.bool:
            raise TypeError(f"mask: expected bool; got {mask.dtype}.")
        mask = self._by_head("mask", mask)
        blocks = torch.arange(mask.shape[2], device=mask.device).view(1, 1, -1)
        return self._fill("mask", blocks, mask, kv_lens, block_table, pages)

    def fill_blocks(
        self,
        blocks: Tensor,
        kv_lens: Tensor,
        block_table: Tensor | None = None,
        pages: HeadPages | PageSteps | None = None,
    ) -> PageTable:
        """Choose blocks by number, such as those of the highest scores; otherwise as fill_mask().

        blocks: int32 or int64 [rows, n] or [rows, num_heads, n] in any order; numbers below 0 or behind the
            end of a row's KV or of its block table choose nothing, repeated ones count once.
        """
        expect_tensor("blocks", blocks)
        if blocks.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"blocks: expected int32 or int64; got {blocks.dtype}.")
        ordered = self._by_head("blocks", blocks).long().sort(-1).values
        keep = ordered >= 0
        keep[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
        return self._fill("blocks", ordered, keep, kv_lens, block_table, pages)

    def _by_head(self, name: str, choice: Tensor) -> Tensor:
        if choice.dim() == 2:
            choice = choice[:, None].expand(-1, self.num_heads, -1)
        if choice.dim() != 3 or choice.shape[1] != self.num_heads or not choice.shape[2]:
            raise ValueError(
                f"{name}: expected [rows, blocks] or [rows, {self.num_heads}, blocks], with a block or more; "
                f"got {tuple(choice.shape)}."
            )
        if choice.shape[0] > self.max_rows:
            raise ValueError(f"{name}: expected at most {self.max_rows} rows; got {choice.shape[0]}.")
        if choice.device != self._table.device:
            raise ValueError(f"{name}: expected device {self._table.device}; got {choice.device}.")
        return choice

    def _fill(
        self,
        name: str,
        blocks: Tensor,
        keep: Tensor,
        kv_lens: Tensor,
        block_table: Tensor | None,
        pages: HeadPages | PageSteps | None,
    ) -> PageTable:
        """blocks: ascending numbers [rows or 1, heads or 1, n]; keep: bool [rows, heads, n]."""
        rows, heads, _ = keep.shape
        self._check(rows, kv_lens, block_table, pages)
        lens = kv_lens.long().view(-1, 1, 1)
        # Numbers of blocks may be anything, so that their tokens might not fit 64 bits.
        keep = keep & (blocks < (lens + self.page_size - 1) // self.page_size)
        if block_table is not None:
            keep = keep & (blocks < block_table.shape[1])
        rank = keep.cumsum(-1) - 1
        count = rank[..., -1] + 1
        last = torch.where(keep, blocks, -1).amax(-1)
        tail = (lens[..., 0] - last * self.page_size).clamp(max=self.page_size)
        tokens = torch.where(count > 0, (count - 1) * self.page_size + tail, 0)
        tokens = torch.where(lens[..., 0] < 0, -1, tokens).clamp(max=self.max_kv_len)

        found, legal = self._pages(blocks, block_table, pages)
        fits = count <= self.max_blocks
        if keep.device.type == "cpu":
            self._expect(name, keep, legal, count, lens)
        # What only a device sees becomes a page that no cache has, which kernels answer with NaN.
        found = torch.where(legal & fits[..., None], found, -1).expand_as(keep)
        slot = torch.where(keep, rank, self.max_blocks).clamp(max=self.max_blocks)
        self._view(self._table, rows).scatter_(-1, slot, found.int())
        self._view(self._kv_lens, rows).copy_(tokens)
        table = self._table[: rows * heads, : self.max_blocks]
        return PageTable.from_block_table(table, self._kv_lens[: rows * heads], page_size=self.page_size)

    def _view(self, buffer: Tensor, rows: int) -> Tensor:
        """The part of a buffer that `rows` rows use, as [rows, heads, ...]."""
        used = buffer[: rows * self.num_heads]
        rest = used.shape[1:]
        if self._heads_first:
            return used.view(self.num_heads, rows, *rest).transpose(0, 1)
        return used.view(rows, self.num_heads, *rest)

    def _pages(
        self, blocks: Tensor, block_table: Tensor | None, pages: HeadPages | PageSteps | None
    ) -> tuple[Tensor, Tensor]:
        """The page of each block among those of the head, and whether the cache has it."""
        page = blocks
        if block_table is not None:
            by_row = block_table[:, None, :].long()
            at = blocks.clamp(0, block_table.shape[1] - 1)
            shape = (block_table.shape[0], at.shape[1], at.shape[2])
            page = by_row.expand(-1, shape[1], -1).gather(-1, at.expand(shape))
        legal = page >= 0
        if pages is None:
            return page, legal
        steps = pages.steps if isinstance(pages, HeadPages) else pages
        kv_head = self._heads * steps.num_kv_heads // self.num_heads
        return page * steps.page + kv_head * steps.head, legal & (page < steps.num_pages)

    def _check(
        self,
        rows: int,
        kv_lens: Tensor,
        block_table: Tensor | None,
        pages: HeadPages | PageSteps | None,
    ) -> None:
        for name, tensor, shape in (("kv_lens", kv_lens, 1), ("block_table", block_table, 2)):
            if tensor is None and name == "block_table":
                continue
            expect_tensor(name, tensor)
            assert tensor is not None
            if tensor.dtype is not torch.int32:
                raise TypeError(f"{name}: expected int32; got {tensor.dtype}.")
            if tensor.dim() != shape or tensor.shape[0] != rows or 0 in tensor.shape[1:]:
                expected = f"[{rows}]" if shape == 1 else f"[{rows}, blocks]"
                raise ValueError(f"{name}: expected {expected}; got {tuple(tensor.shape)}.")
            if tensor.device != self._table.device:
                raise ValueError(f"{name}: expected device {self._table.device}; got {tensor.device}.")
        if pages is None and self.num_heads > 1:
            raise ValueError(
                "pages: expected HeadPages of the caches, for every head has pages of its own; got None."
            )
        if not isinstance(pages, (HeadPages, PageSteps, type(None))):
            raise TypeError(f"pages: expected HeadPages or PageSteps; got {type(pages).__name__}.")
        steps = pages.steps if isinstance(pages, HeadPages) else pages
        if steps is not None and self.num_heads % steps.num_kv_heads:
            raise ValueError(
                f"pages: expected caches of at most {self.num_heads} KV heads, of which num_heads is a "
                f"multiple; got {steps.num_kv_heads}."
            )

    def _expect(self, name: str, keep: Tensor, legal: Tensor, count: Tensor, lens: Tensor) -> None:
        """What a CPU can look at."""
        if bool((lens < 0).any()):
            raise ValueError(f"kv_lens: expected lengths >= 0; got {lens.flatten().tolist()}.")
        most = int(count.max()) if count.numel() else 0
        if most > self.max_blocks:
            row, head = (count > self.max_blocks).nonzero()[0].tolist()
            raise ValueError(
                f"{name}: expected at most max_blocks = {self.max_blocks} blocks; got "
                f"{int(count[row, head])} in row {row} of head {head}. Raise max_blocks at construction."
            )
        if bool((wrong := keep & ~legal).any()):
            row, head, _ = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"block_table: expected pages that the cache has where blocks are chosen; row {row} of head "
                f"{head} has another."
            )
