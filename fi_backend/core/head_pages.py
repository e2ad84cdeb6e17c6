# SPDX-License-Identifier: Apache-2.0
"""Caches of several KV heads seen as pages of one head each, so that every head can have rows of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from fi_backend.core.attention_checks import expect_tensor
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError

_MAX_PAGES = 2**31 - 1


def expect_no_positions(spec: AttentionSpec) -> None:
    """Refuse what chosen blocks cannot have: they are read as if they were neighbours.

    Raises UnsupportedError for windows, ALiBi and custom masks.
    """
    if spec.window_left >= 0:
        raise UnsupportedError(
            f"window_left: expected -1, for keys of chosen blocks have no positions; got {spec.window_left}. "
            "Choose the blocks of the window."
        )
    if spec.alibi:
        raise UnsupportedError(
            "alibi: expected False, for keys of chosen blocks have no positions; got True."
        )
    if spec.custom_mask:
        raise UnsupportedError(
            "custom_mask: expected False; got True. Choose smaller blocks, or pass it to BatchAttention."
        )


def spec_of_head(spec: AttentionSpec, num_heads: int) -> AttentionSpec:
    """Return the spec of one of `num_heads` heads that choose their keys for themselves.

    num_heads: num_kv_heads, or num_qo_heads where the query heads of a group choose apart, and then read the
    keys of their KV head apart. Raises ValueError for another number, UnsupportedError for options that need
    the positions of keys or have a value for each head. A variant sees the one head.
    """
    expect_no_positions(spec)
    if num_heads not in (spec.num_kv_heads, spec.num_qo_heads):
        raise ValueError(
            f"num_heads: expected the {spec.num_kv_heads} KV heads or the {spec.num_qo_heads} query heads of "
            f"the spec; got {num_heads}."
        )
    if spec.sinks and num_heads > 1:
        raise UnsupportedError(
            "sinks: expected False where heads choose keys for themselves, for they run as requests of one "
            "head, which have one value; got True. Choose the same blocks for all heads."
        )
    return replace(spec, num_qo_heads=spec.num_qo_heads // num_heads, num_kv_heads=1)


@dataclass(frozen=True, slots=True)
class PageSteps:
    """Page p of KV head h is page ``p * page + h * head`` of the views of a HeadPages."""

    page: int
    head: int
    num_pages: int
    num_kv_heads: int

    @classmethod
    def contiguous(cls, num_pages: int, page_size: int, num_kv_heads: int) -> PageSteps:
        """Those of contiguous caches [num_pages, page_size, num_kv_heads, head_dim]."""
        apart = num_pages > 1 and num_kv_heads > 1
        return cls(page_size * num_kv_heads if apart else 1, 1, num_pages, num_kv_heads)


class HeadPages:
    """Views of two caches in which a page belongs to one KV head; no byte is copied.

    k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim], last dimension contiguous, in any layout
    whose page and head strides are in the same proportion in both (NHD, HND, K beside V).

    steps: where page p of head h is among the pages of the views. k_pages, v_pages: [views, page_size, 1,
    head_dim], for BatchAttention.run() of a spec_of_head(). Views overlap where heads lie between the tokens
    of a page; only the pages that `steps` names belong to one head. Raises ValueError naming the argument.
    """

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            expect_tensor(name, cache)
            if cache.dim() != 4 or 0 in cache.shape:
                raise ValueError(
                    f"{name}: expected [pages, page_size, num_kv_heads, head_dim], none 0; "
                    f"got {tuple(cache.shape)}."
                )
        if k_cache.shape[:3] != v_cache.shape[:3]:
            raise ValueError(f"v_cache: expected {tuple(k_cache.shape[:3])}; got {tuple(v_cache.shape[:3])}.")
        page, head, unit_k = _steps("k_cache", k_cache)
        page_v, head_v, unit_v = _steps("v_cache", v_cache)
        if (page, head) != (page_v, head_v):
            raise ValueError(
                "v_cache: expected page and head strides in the proportion of those of k_cache, "
                f"{page} : {head}; got {page_v} : {head_v}. Give both caches the same layout."
            )
        pages, heads = k_cache.shape[0], k_cache.shape[2]
        self.steps = PageSteps(page, head, pages, heads)
        count = (pages - 1) * page + (heads - 1) * head + 1
        if count > _MAX_PAGES:
            raise ValueError(f"k_cache: expected at most {_MAX_PAGES} pages of one head; got {count}.")
        self.k_pages, self.v_pages = _view(k_cache, count, unit_k), _view(v_cache, count, unit_v)


def _steps(name: str, cache: Tensor) -> tuple[int, int, int]:
    """Page and head stride in their greatest common unit, and the unit in elements."""
    page, head = cache.stride(0), cache.stride(2)
    if (page < 1 and cache.shape[0] > 1) or (head < 1 and cache.shape[2] > 1):
        raise ValueError(f"{name}: expected page and head strides >= 1; got {page} and {head}.")
    # The stride of a single page or head is arbitrary.
    if cache.shape[2] == 1:
        head = page if cache.shape[0] > 1 else cache.shape[3]
    if cache.shape[0] == 1:
        page = head
    unit = math.gcd(page, head)
    return page // unit, head // unit, unit


def _view(cache: Tensor, count: int, unit: int) -> Tensor:
    size = (count, cache.shape[1], 1, cache.shape[3])
    return cache.as_strided(size, (unit, cache.stride(1), unit, cache.stride(3)))
