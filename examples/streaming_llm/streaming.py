# SPDX-License-Identifier: Apache-2.0
"""Endless decoding with attention sinks: first and last pages, positions counted inside the cache.

The idea is that of StreamingLLM (Xiao et al., 2023, arXiv:2309.17453). A request keeps its first tokens, the
sinks, and a window of the last ones; what lies between is dropped, and rotary positions count what is kept.
So a key's position changes when older ones go, and the cache holds keys as they were before the rotation:

- FusedStreaming rotates them inside attention, by the variant `fi_backend.variants.rope`;
- UnfusedStreaming rotates all of them into a scratch cache at every step, and attends over that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fi_backend import AttentionSpec, BatchAttention, PageTable, append_kv
from fi_backend.variants import rope, rope_frequencies


class RollingPages:
    """The pages of requests that each keep `sink_pages` first pages and up to `window_pages` last ones.

    The page table has the sinks, then the window from its oldest page on; the oldest one is taken again for
    new tokens once all are full. So a request keeps between (window_pages - 1) * page_size + 1 and
    window_pages * page_size of its last tokens. table: int32 [requests, pages]; kv_lens: int32 [requests],
    the tokens that are kept.
    """

    def __init__(
        self,
        requests: int,
        *,
        page_size: int,
        sink_pages: int,
        window_pages: int,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"requests": requests, "page_size": page_size, "sink_pages": sink_pages}
        for name, value in {**sizes, "window_pages": window_pages}.items():
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more; got {value}.")
        self.page_size, self.sink_pages, self.pages = page_size, sink_pages, sink_pages + window_pages
        self.num_pages = requests * self.pages
        self._rows = [list(range(r * self.pages, (r + 1) * self.pages)) for r in range(requests)]
        self._lens = [0] * requests
        self.table = torch.zeros(requests, self.pages, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(requests, dtype=torch.int32, device=device)
        self._upload()

    @property
    def capacity(self) -> int:
        """Tokens that a request keeps at most."""
        return self.pages * self.page_size

    def append(self, counts: Sequence[int]) -> Tensor:
        """Make room for counts[r] new tokens of every request r; returns their slots: int64 [tokens].

        Raises ValueError for more tokens at once than the window keeps.
        """
        if len(counts) != len(self._lens):
            raise ValueError(f"counts: expected {len(self._lens)} requests; got {len(counts)}.")
        kept = (self.pages - self.sink_pages - 1) * self.page_size + 1
        for request, count in enumerate(counts):
            if count > kept and self._lens[request] + count > self.capacity:
                raise ValueError(f"counts[{request}]: expected at most {kept} tokens at once; got {count}.")
        slots = [self._next_slot(request) for request, count in enumerate(counts) for _ in range(count)]
        self._upload()
        return torch.tensor(slots, dtype=torch.int64, device=self.table.device)

    def _next_slot(self, request: int) -> int:
        row = self._rows[request]
        if self._lens[request] == self.capacity:
            row.append(row.pop(self.sink_pages))
            self._lens[request] -= self.page_size
        page, offset = divmod(self._lens[request], self.page_size)
        self._lens[request] += 1
        return row[page] * self.page_size + offset

    def _upload(self) -> None:
        """At the same addresses, so that a captured graph reads them."""
        self.table.copy_(torch.tensor(self._rows, dtype=torch.int32))
        self.kv_lens.copy_(torch.tensor(self._lens, dtype=torch.int32))


class FusedStreaming:
    """A layer over caches of unrotated keys, which attention rotates as it reads them.

    spec: the layer. pages: shared by all layers. max_tokens: query tokens of a step. theta: base of the
    rotary frequencies. k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim].
    """

    fused = True

    def __init__(
        self, spec: AttentionSpec, pages: RollingPages, *, max_tokens: int, theta: float = 10000.0
    ) -> None:
        self.spec, self.pages = spec, pages
        device = pages.table.device
        shape = (pages.num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self.k_cache, self.v_cache = torch.zeros(2, *shape, dtype=getattr(torch, spec.dtype), device=device)
        self.attention = BatchAttention(
            spec,
            max_requests=len(pages.kv_lens),
            max_tokens=max_tokens,
            max_kv_len=pages.capacity,
            device=device,
            variant=rope(spec.head_dim, theta=theta) if self.fused else None,
        )

    def append(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write new tokens, whose slots RollingPages gave, as they are."""
        append_kv(keys, values, self.k_cache, self.v_cache, slots)

    def plan(self, qo_indptr: Tensor) -> None:
        """Balance a step after its pages.append(). qo_indptr: int32 [requests + 1]."""
        table = PageTable.from_block_table(
            self.pages.table, self.pages.kv_lens, page_size=self.spec.page_size
        )
        self.attention.plan(qo_indptr, table)

    def run(self, q: Tensor) -> Tensor:
        """Attend; q: unrotated [tokens, num_qo_heads, head_dim], the last query stands at the last key."""
        return self.attention.run(q, self.k_cache, self.v_cache)


class UnfusedStreaming(FusedStreaming):
    """The same with keys that are rotated into a scratch cache at every step, as windows that move need.

    compile_with: wraps the function that rotates, such as torch.compile.
    """

    fused = False

    def __init__(
        self,
        spec: AttentionSpec,
        pages: RollingPages,
        *,
        max_tokens: int,
        theta: float = 10000.0,
        compile_with: Callable[..., Callable[..., Tensor]] = lambda function: function,
    ) -> None:
        super().__init__(spec, pages, max_tokens=max_tokens, theta=theta)
        self._rotated = torch.zeros_like(self.k_cache)
        turns = rope_frequencies(spec.head_dim, theta=theta).double().sum(1)
        angles = 2 * torch.pi * torch.arange(pages.capacity).double()[:, None] * turns
        table = torch.stack((angles.cos(), angles.sin())).float().to(pages.table.device)
        self._cos, self._sin = table[:, :, None]  # [positions, 1, head_dim / 2]
        self._place = torch.zeros(pages.num_pages, dtype=torch.int64, device=pages.table.device)
        self._places = torch.arange(pages.pages, device=pages.table.device).repeat(len(pages.kv_lens))
        self._rotate_keys = compile_with(_rotate_into)

    def plan(self, qo_indptr: Tensor) -> None:
        """Balance a step; keys are read from the scratch cache, values where they lie."""
        super().plan(qo_indptr)
        self._qo_indptr = qo_indptr

    def run(self, q: Tensor) -> Tensor:
        """Rotate the keys and the queries, then attend."""
        # Keys stay in their pages, as values do, since one page table serves both.
        self._place.scatter_(0, self.pages.table.view(-1).long(), self._places)
        cos, sin = (x.unflatten(0, (self.pages.pages, -1)) for x in (self._cos, self._sin))
        self._rotate_keys(self._rotated, self.k_cache, cos, sin, self._place)
        ends = self._qo_indptr[1:]
        token = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        request = torch.searchsorted(ends, token, right=True)
        position = (self.pages.kv_lens - ends)[request] + token
        turned = _rotate(q, self._cos[position], self._sin[position])
        return self.attention.run(turned, self._rotated, self.v_cache)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Elements d and d + head_dim / 2 turn together."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _rotate_into(rotated: Tensor, k_cache: Tensor, cos: Tensor, sin: Tensor, place: Tensor) -> Tensor:
    """Rotate the keys of every page by the page's place in its request."""
    return rotated.copy_(_rotate(k_cache, cos[place], sin[place]))
