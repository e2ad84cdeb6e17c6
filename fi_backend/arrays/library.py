# SPDX-License-Identifier: Apache-2.0
"""Which library made an array, and what the others need to know about it. None is imported here but NumPy."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any, Protocol

import numpy as np


class Array(Protocol):
    """An array that DLPack describes, as NumPy, JAX, CuPy, torch and others make it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its dimensions."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a capsule that describes it."""

    def __dlpack_device__(self) -> Any:
        """Return the type and the number of its device."""


class Library(Enum):
    """The libraries that are told apart; OTHER are known by the array API standard alone."""

    NUMPY = "NumPy"
    JAX = "JAX"
    CUPY = "CuPy"
    TORCH = "torch"
    OTHER = "another library"


class CapturingStream(int):
    """The handle of a CUDA stream on which a graph is being captured."""


_CLASSES = {
    Library.JAX: ("jax", "Array"),
    Library.CUPY: ("cupy", "ndarray"),
    Library.TORCH: ("torch", "Tensor"),
}
_CPU, _CUDA = 1, 2  # DLDeviceType
_DEVICE_NAMES = {_CPU: "cpu", _CUDA: "cuda"}


def library_of(array: object) -> Library:
    """Return the library that made `array`."""
    if isinstance(array, np.ndarray):
        return Library.NUMPY
    for library, (module, name) in _CLASSES.items():
        # Only an imported library can have made it.
        kind = getattr(sys.modules.get(module), name, None)  # None, too, while another thread imports it
        if kind is not None and isinstance(array, kind):
            return library
    return Library.OTHER


def expect_array(name: str, value: object) -> None:
    """Check that `value` is an array of any library; raises TypeError naming the argument."""
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    if tracer is not None and isinstance(value, tracer):
        raise TypeError(
            f"{name}: expected an array with values; got a tracer of JAX. Call it outside jax.jit, jax.grad "
            "and jax.vmap."
        )
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        raise TypeError(
            f"{name}: expected an array with __dlpack__ (NumPy, JAX, CuPy, torch, ..); got "
            f"{type(value).__name__}."
        )
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected a plain array; got a masked one, whose mask would be ignored.")


def device_of(name: str, array: Array) -> str:
    """Return "cpu", "cuda:0" and so on; raises ValueError for a device that has no kernels."""
    kind, index = array.__dlpack_device__()
    if (known := _DEVICE_NAMES.get(int(kind))) is None:
        raise ValueError(
            f"{name}: expected an array in host memory or on a CUDA device; got one of DLPack's device type "
            f"{int(kind)}."
        )
    return known if known == "cpu" else f"{known}:{index}"


def current_stream(array: Array) -> int:
    """Return the handle of the stream on which the array's library queues its work now; 0: CUDA's default.

    JAX and libraries that are not told apart keep their streams to themselves: 0.
    """
    made: Any = array
    library = library_of(array)
    if library is Library.CUPY:
        with made.device:
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    if library is Library.TORCH:
        return int(sys.modules["torch"].cuda.current_stream(made.device).cuda_stream)
    return 0


def stream_handle(stream: object) -> int:
    """Return the handle of a stream given as such, or as an object of CuPy, torch, cuda.core and others.

    Raises TypeError for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        return int(protocol()[1])
    for attribute in ("ptr", "cuda_stream"):
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    raise TypeError(
        f"stream: expected an int or an object with __cuda_stream__; got {type(stream).__name__}."
    )
