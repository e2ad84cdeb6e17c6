# SPDX-License-Identifier: Apache-2.0
"""append_kv and the merges of attention states on arrays of any library."""

from __future__ import annotations

from typing import Any, TypeVar

from fi_backend.arrays.arguments import scale_view
from fi_backend.arrays.host import HostPlace
from fi_backend.arrays.library import Array, device_of, expect_array, library_of
from fi_backend.arrays.native import advised
from fi_backend.arrays.place import place
from fi_backend.arrays.result import allocated, given
from fi_backend.arrays.view import host_view, view
from fi_backend.core import jit
from fi_backend.core.index_arrays import as_dtype, expect_dtype

_Array = TypeVar("_Array", bound=Array)


def append_kv(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    stream: object = None,
) -> None:
    """Write key / k_scale and value / v_scale into the caches, rounded to the caches' dtype.

    Arrays lie on one device.
    key: [tokens, num_kv_heads, head_dim], value: [tokens, num_kv_heads, head_dim_v]; float32, float16 or
        bfloat16, last dimension contiguous. k_cache: [pages, page_size, num_kv_heads, head_dim] or
        [total, num_kv_heads, head_dim], v_cache alike with head_dim_v; any of these dtypes or fp8, any
        strides with a contiguous last dimension; writable, which JAX's arrays are not.
    slot_mapping: int64 [n], on a CPU int32 too, n <= tokens: page * page_size + offset of each token, -1 to
        skip it. The slots of one call have to differ.
    k_scale, v_scale, and what happens to slots outside of the cache: as for fi_backend.append_kv(). stream:
    of CUDA (default: the current one of key's library).

    Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    here, handle = _where("key", key, stream)
    if isinstance(here, HostPlace):
        slots = host_view("slot_mapping", slot_mapping)
        expect_dtype("slot_mapping", slots, "int64", "int32")
        slot_mapping = as_dtype(slots, "int64")
    with advised(), here.using(handle):
        jit.load(here.ops_module).append_kv(
            view("key", key, stream=handle),
            view("value", value, stream=handle),
            view("slot_mapping", slot_mapping, stream=handle),
            scale_view("k_scale", k_scale, here, handle),
            scale_view("v_scale", v_scale, here, handle),
            here.append_option(),
            view("k_cache", k_cache, stream=handle, writable=True),
            view("v_cache", v_cache, stream=handle, writable=True),
        )
    here.finish(library_of(key), handle)


def merge_state(
    o_a: _Array,
    lse_a: Array,
    o_b: Array,
    lse_b: Array,
    *,
    out: Any = None,
    lse: Any = None,
    mask: Array | None = None,
    stream: object = None,
) -> tuple[_Array, _Array]:
    """Return (o_a, lse_a) ⊕ (o_b, lse_b), the attention over both sets of keys.

    Arguments as for fi_backend.merge_state(), arrays of any library on one device. out, lse: writable arrays
    (default: new ones of o_a's library). stream: of CUDA (default: the current one of o_a's library).

    Returns (out, lse). Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    here, handle = _where("o_a", o_a, stream)
    expect_array("lse_a", lse_a)
    to = _result("out", out, o_a, tuple(o_a.shape), None, handle)
    sums = _result("lse", lse, o_a, tuple(lse_a.shape), "float32", handle)
    with advised(), here.using(handle):
        jit.load(here.ops_module).merge_state(
            view("o_a", o_a, stream=handle),
            view("lse_a", lse_a, stream=handle),
            view("o_b", o_b, stream=handle),
            view("lse_b", lse_b, stream=handle),
            None if mask is None else view("mask", mask, stream=handle),
            *here.threads(),
            to.view,
            sums.view,
        )
    here.finish(library_of(o_a), handle)
    return to.deliver(), sums.deliver()


def merge_states(
    o: _Array, lse_parts: Array, *, out: Any = None, lse: Any = None, stream: object = None
) -> tuple[_Array, _Array]:
    """Return the left fold of ⊕ over dimension 1: ((part 0 ⊕ part 1) ⊕ part 2) ⊕ ...

    o: [n, parts, heads, head_dim], lse_parts: float32 [n, parts, heads]; as for fi_backend.merge_states(),
    arrays of any library on one device. out, lse, stream: as for merge_state().

    Returns (out, lse). Raises ValueError or TypeError that names the argument; nothing is written then.
    """
    here, handle = _where("o", o, stream)
    if len(o.shape) != 4:
        raise ValueError(f"o: expected [n, parts, heads, head_dim]; got shape {tuple(o.shape)}.")
    n, _, heads, dim = o.shape
    to = _result("out", out, o, (n, heads, dim), None, handle)
    sums = _result("lse", lse, o, (n, heads), "float32", handle)
    with advised(), here.using(handle):
        jit.load(here.ops_module).merge_states(
            view("o", o, stream=handle),
            view("lse_parts", lse_parts, stream=handle),
            *here.threads(),
            to.view,
            sums.view,
        )
    here.finish(library_of(o), handle)
    return to.deliver(), sums.deliver()


def _where(name: str, array: Array, stream: object) -> tuple[Any, int]:
    """The place of a call and the handle of its stream."""
    expect_array(name, array)
    here = place(device_of(name, array))
    return here, here.stream_of(stream, array)


def _result(name: str, array: Any, like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Any:
    if array is not None:
        return given(name, array, stream=stream)
    return allocated(like, shape, dtype=dtype, stream=stream)
