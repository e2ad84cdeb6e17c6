# SPDX-License-Identifier: Apache-2.0
"""Arrays for results: made by the library of the inputs, written by a kernel, then handed over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fi_backend.arrays.host import aligned_empty
from fi_backend.arrays.library import Array, Library, device_of, library_of
from fi_backend.arrays.view import view


class Result(NamedTuple):
    """A view for a kernel to write, and what makes it an array of the caller's library afterwards."""

    view: Any
    deliver: Callable[[], Any]


def given(name: str, array: Array, *, stream: int, raw: str | None = None) -> Result:
    """Return an array of the caller as a result; see view() for the errors."""
    return Result(view(name, array, stream=stream, writable=True, raw=raw), lambda: array)


def allocated(
    like: Any, shape: tuple[int, ...], *, stream: int, dtype: str | None = None, raw: str | None = None
) -> Result:
    """Return a new array of the library and on the device of `like`.

    dtype: its name (default: that of `like`). raw: see view(). Raises TypeError for a library that is not
    known and has no namespace of the array API standard.
    """
    library = library_of(like)
    if library is Library.JAX:
        return _of_jax(like, shape, dtype, stream)
    array = _MAKERS[library](like, shape, dtype)
    return Result(view("out", array, stream=stream, writable=True, raw=raw), lambda: array)


def _of_numpy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    return np.empty(shape, like.dtype if dtype is None else dtype)


def _of_cupy(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    with like.device:
        return sys.modules["cupy"].empty(shape, like.dtype if dtype is None else dtype)


def _of_torch(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    kind = like.dtype if dtype is None else getattr(sys.modules["torch"], dtype)
    return like.new_empty(shape, dtype=kind)


def _of_namespace(like: Any, shape: tuple[int, ...], dtype: str | None) -> Any:
    if not hasattr(like, "__array_namespace__"):
        raise TypeError(
            f"out: expected an array, since {type(like).__name__} has no __array_namespace__ to make one "
            "with; got None."
        )
    namespace = like.__array_namespace__()
    kind = like.dtype if dtype is None else getattr(namespace, dtype)
    return namespace.empty(shape, dtype=kind, device=like.device)


_MAKERS: dict[Library, Callable[[Any, tuple[int, ...], str | None], Any]] = {
    Library.NUMPY: _of_numpy,
    Library.CUPY: _of_cupy,
    Library.TORCH: _of_torch,
    Library.OTHER: _of_namespace,
}


def _of_jax(like: Any, shape: tuple[int, ...], dtype: str | None, stream: int) -> Result:
    """An array that JAX has not seen before the kernel has written it."""
    jax = sys.modules["jax"]
    kind = like.dtype if dtype is None else dtype
    if device_of("q", like) == "cpu":
        written = view("out", aligned_empty(shape, kind))
        return Result(written, lambda: jax.dlpack.from_dlpack(written, device=like.device))
    # Of its own memory pool; nobody has read it before it is returned.
    array = jax.numpy.empty(shape, dtype=kind, device=like.device).block_until_ready()
    return Result(view("out", array, stream=stream), lambda: array)
