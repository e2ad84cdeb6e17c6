# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence over chosen blocks, with masks that change from step to step."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.attention_checks import expect_tensor
from fi_backend.core.block_selection import BlockSelection
from fi_backend.core.block_sparse import BlockSparse
from fi_backend.core.head_pages import HeadPages, PageSteps, expect_no_positions, spec_of_head
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError, UnsupportedError


class BlockSparseAttention:
    """Queries in blocks of `block_rows` tokens, each of which sees chosen blocks of spec.page_size keys.

    spec: the layer; page_size is the block of keys (Bc), of any size. causal=True aligns the last query with
    the last key: blocks behind a block of queries are never read, and those that hold its own tokens always
    are, whatever the mask says. num_rows, num_cols: query and KV tokens; the last block of either may be
    partial. block_rows: query tokens of a block (Br), any number from 1. num_heads: 1 for one mask for all
    heads, num_kv_heads or num_qo_heads for a mask of each. max_blocks: that a block of queries may see
    (default: all of them). device, num_ctas: as for BatchAttention.

    Only chosen blocks are read. All memory is allocated here, so that a mask of another step or layer costs
    no allocation but what filling it needs, and a captured CUDA graph may hold plan() and run(). Raises
    ValueError naming the argument, UnsupportedError for options that need the positions of keys (windows,
    ALiBi), for custom masks, and for sinks with masks of each head.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        num_rows: int,
        num_cols: int,
        block_rows: int,
        num_heads: int = 1,
        max_blocks: int | None = None,
        device: str | torch.device = "cpu",
        num_ctas: int | None = None,
    ) -> None:
        for name, value in (("num_rows", num_rows), ("num_cols", num_cols), ("block_rows", block_rows)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more; got {value}.")
        expect_no_positions(spec)
        if spec.causal and num_cols < num_rows:
            raise ValueError(
                f"num_cols: expected at least the {num_rows} query tokens with causal=True, which stand at "
                f"the last keys; got {num_cols}."
            )
        self.spec, self.block_rows, self.num_heads = spec, block_rows, num_heads
        self.num_rows, self.num_cols = num_rows, num_cols
        self.row_blocks, self.col_blocks = -(-num_rows // block_rows), -(-num_cols // spec.page_size)
        most = self.col_blocks if max_blocks is None else min(max_blocks, self.col_blocks)
        inner = spec if num_heads == 1 else spec_of_head(spec, num_heads)
        self.attention = BatchAttention(
            inner,
            max_requests=self.row_blocks * num_heads,
            max_tokens=num_rows * num_heads,
            max_kv_len=most * spec.page_size,
            device=device,
            num_ctas=num_ctas,
        )
        device = self.attention.device
        self._selection = BlockSelection(
            max_rows=self.row_blocks,
            max_blocks=most,
            page_size=spec.page_size,
            num_heads=num_heads,
            device=device,
            heads_first=True,
        )
        starts = (torch.arange(self.row_blocks + 1) * block_rows).clamp_max(num_rows)
        ends = starts[1:] + num_cols - num_rows if spec.causal else torch.full_like(starts[1:], num_cols)
        by_head = torch.arange(num_heads)[:, None] * num_rows + starts[:-1]
        self._qo_indptr = (
            torch.cat((by_head.flatten(), torch.tensor([num_heads * num_rows]))).int().to(device)
        )
        self._kv_lens = ends.int().to(device)
        self._own = self._own_blocks(starts, ends).to(device) if spec.causal else None
        self._steps = PageSteps.contiguous(self.col_blocks, spec.page_size, spec.num_kv_heads)
        self._filled: PageSteps | None = None  # by the last mask; None where none is planned
        dtype, group = getattr(torch, spec.dtype), spec.num_qo_heads // num_heads
        rows = num_heads * num_rows if num_heads > 1 else 0
        self._q = torch.empty(rows, group, spec.head_dim, dtype=dtype, device=device)
        self._out = torch.empty(rows, group, spec.head_dim_v, dtype=dtype, device=device)
        self._lse = torch.empty(rows, group, device=device)

    def _own_blocks(self, starts: Tensor, ends: Tensor) -> Tensor:
        """bool [row blocks, 1, col blocks]: those that hold tokens of the queries themselves."""
        begin = torch.arange(self.col_blocks) * self.spec.page_size
        first = (ends - (starts[1:] - starts[:-1]))[:, None]
        return ((begin + self.spec.page_size > first) & (begin < ends[:, None]))[:, None]

    def plan(self, mask: Tensor | BlockSparse, caches: tuple[Tensor, Tensor] | None = None) -> Plan | None:
        """Choose the blocks of a step and balance their work; returns what BatchAttention.plan() does.

        mask: bool [row blocks, column blocks], or [num_heads, row blocks, column blocks]; or a BlockSparse of
            the same sizes, for one choice of all heads without causal. caches: (k, v) of a layout that is not
            contiguous, as run() will get them, where heads have masks of their own.

        Raises ValueError, TypeError or PlanError naming the argument; on CUDA a block of queries that chooses
        more than max_blocks gives NaN.
        """
        if isinstance(mask, BlockSparse):
            table = self._expect_matrix(mask).to_page_table()
            self._filled = None
        else:
            table = self._fill(mask, caches)
        return self.attention.plan(self._qo_indptr, table)

    def update(self, mask: Tensor, caches: tuple[Tensor, Tensor] | None = None) -> None:
        """Choose other blocks under the plan that is there: results are the mask's, only the balance is not.

        For the layers of one step, whose masks choose about as many blocks; mask, caches as for plan(). Not
        in the batch-invariant mode, whose plans count partial states.
        """
        if self.spec.batch_invariant:
            raise UnsupportedError(
                "update: expected batch_invariant=False; got True. Call plan() for each mask."
            )
        if self._filled is None:
            raise PlanError(
                "update: expected plan() to have been given a mask; got no plan, or that of a BlockSparse."
            )
        self._fill(mask, caches)

    def _fill(self, mask: Tensor, caches: tuple[Tensor, Tensor] | None) -> PageTable:
        expect_tensor("mask", mask)
        shapes = {(self.row_blocks, self.col_blocks), (self.num_heads, self.row_blocks, self.col_blocks)}
        if mask.dtype is not torch.bool or tuple(mask.shape) not in shapes:
            known = " or ".join(str(list(shape)) for shape in sorted(shapes, key=len))
            raise ValueError(f"mask: expected bool {known}; got {mask.dtype} {tuple(mask.shape)}.")
        by_row = mask[:, None] if mask.dim() == 2 else mask.transpose(0, 1)
        by_row = by_row.expand(-1, self.num_heads, -1)
        if self._own is not None:
            by_row = by_row | self._own
        steps = self._steps
        if caches is not None and self.num_heads > 1:
            if len(caches) != 2:
                raise ValueError(f"caches: expected (k, v); got {len(caches)} of them.")
            steps = HeadPages(*self._paged(*caches)).steps
        pages = steps if self.num_heads > 1 else None
        table = self._selection.fill_mask(by_row, self._kv_lens, pages=pages)
        self._filled = steps
        return table

    def _expect_matrix(self, matrix: BlockSparse) -> BlockSparse:
        if self.spec.causal or self.num_heads > 1:
            raise PlanError(
                "mask: expected bool [row blocks, column blocks] with causal=True or with masks of each "
                "head; got a BlockSparse. Pass its to_block_mask()."
            )
        sizes = ("num_rows", "num_cols", "block_rows", "block_cols")
        own = (self.num_rows, self.num_cols, self.block_rows, self.spec.page_size)
        for name, value in zip(sizes, own, strict=True):
            if getattr(matrix, name) != value:
                raise PlanError(f"mask: expected {name} = {value}; got {getattr(matrix, name)}.")
        return matrix

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention under the mask that was chosen last.

        q: [num_rows, num_qo_heads, head_dim]. k, v: [num_cols, num_kv_heads, dim], or [column blocks,
            page_size, num_kv_heads, dim] with any strides; with masks of each head num_cols is rounded up to
            whole blocks, whose tail is never read. out, lse, scales, sinks: as for BatchAttention.run(); with
            masks of each head scales are numbers.

        Returns out. Raises ValueError or TypeError naming the argument.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            expect_tensor(name, tensor)
        if q.dim() != 3 or q.shape[0] != self.num_rows:
            raise ValueError(f"q: expected [{self.num_rows}, heads, dim]; got {tuple(q.shape)}.")
        if self.num_heads == 1:
            self._expect_keys(k, v, self.num_cols)
            return self.attention.run(
                q, k, v, out=out, lse=lse, k_scale=k_scale, v_scale=v_scale, sinks=sinks
            )
        spec, rows = self.spec, (self.num_rows, self.spec.num_qo_heads)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if isinstance(scale, Tensor) and scale.numel() > 1:
                raise UnsupportedError(
                    f"{name}: expected a number with masks of each head, which run as requests of one head; "
                    f"got {scale.numel()} scales."
                )
        if out is None:
            out = q.new_empty(*rows, spec.head_dim_v)
        _expect_like("q", q, self._q, (*rows, spec.head_dim))
        _expect_like("out", out, self._out, (*rows, spec.head_dim_v))
        if lse is not None:
            _expect_like("lse", lse, self._lse, rows)
        pages = HeadPages(*self._paged(k, v))
        if self._filled is not None and pages.steps != self._filled:
            raise PlanError(
                "k, v: expected the layout that plan() was given; got another. Pass caches=(k, v) to plan()."
            )
        self._by_head(self._q).copy_(q.unflatten(1, (self.num_heads, -1)))
        self.attention.run(
            self._q,
            pages.k_pages,
            pages.v_pages,
            out=self._out,
            lse=None if lse is None else self._lse,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
        )
        out.unflatten(1, (self.num_heads, -1)).copy_(self._by_head(self._out))
        if lse is not None:
            lse.unflatten(1, (self.num_heads, -1)).copy_(self._by_head(self._lse))
        return out

    def _by_head(self, rows: Tensor) -> Tensor:
        """[num_rows, num_heads, ...] of rows that stand head by head."""
        return rows.view(self.num_heads, self.num_rows, *rows.shape[1:]).transpose(0, 1)

    def _expect_keys(self, k: Tensor, v: Tensor, least: int) -> None:
        for name, tensor in (("k", k), ("v", v)):
            blocks = tensor.dim() == 4
            need = self.col_blocks if blocks else least
            if tensor.dim() not in (3, 4) or tensor.shape[0] < need:
                what = f"[{self.col_blocks}, {self.spec.page_size}, ...] or [{least}, ...]"
                raise ValueError(f"{name}: expected {what} or more; got {tuple(tensor.shape)}.")
            if tensor.shape[-2] != self.spec.num_kv_heads:
                raise ValueError(
                    f"{name}: expected {self.spec.num_kv_heads} KV heads, as the spec says; got "
                    f"{tuple(tensor.shape)}."
                )

    def _paged(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Whole blocks of keys and values."""
        size = self.spec.page_size
        self._expect_keys(k, v, self.col_blocks * size)
        k, v = (
            x[: self.col_blocks]
            if x.dim() == 4
            else x[: self.col_blocks * size].unflatten(0, (self.col_blocks, size))
            for x in (k, v)
        )
        return k, v


def _expect_like(name: str, tensor: Tensor, own: Tensor, shape: tuple[int, ...]) -> None:
    """Check what a copy between `tensor` and our buffer would convert in silence."""
    if tensor.dtype is not own.dtype or tuple(tensor.shape) != shape or tensor.device != own.device:
        expected = f"{own.dtype} {list(shape)} on {own.device}"
        raise ValueError(
            f"{name}: expected {expected}; got {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
        )
