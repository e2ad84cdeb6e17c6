# SPDX-License-Identifier: Apache-2.0
"""What a kernel cannot see: arrays, of any library, that agree with each other and not with the spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fi_backend.core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


def expect_layout(spec: AttentionSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check the shapes of queries and caches."""
    heads, dim, dim_v = spec.num_qo_heads, spec.head_dim, spec.head_dim_v
    if q.ndim != 3 or q.shape[1] != heads or q.shape[2] != dim:
        raise ValueError(f"q: expected [tokens, {heads}, {dim}], as the spec says; got {tuple(q.shape)}.")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.ndim not in (3, 4):
            raise ValueError(
                f"{name}: expected [pages, page_size, KV heads, head_dim] or [tokens, KV heads, head_dim]; "
                f"got {tuple(cache.shape)}."
            )
    if k_cache.shape[-2] != spec.num_kv_heads:
        raise ValueError(
            f"k_cache: expected {spec.num_kv_heads} KV heads in its last dimension but one, as the "
            f"spec says; got {tuple(k_cache.shape)}."
        )
    if v_cache.shape[-1:] != (dim_v,):
        raise ValueError(
            f"v_cache: expected head_dim_v = {dim_v} elements in its last dimension, as the spec says; "
            f"got {tuple(v_cache.shape)}."
        )


def expect_given(name: str, tensor: Tensor | None, wanted: bool) -> None:
    """Check that an optional tensor is there exactly when the spec says so."""
    if (tensor is not None) != wanted:
        expected, got = ("a tensor", "None") if wanted else ("None", "a tensor")
        raise ValueError(f"{name}: expected {expected}, as the spec says; got {got}.")
