# SPDX-License-Identifier: Apache-2.0
"""The few calls of the CUDA driver that remain where no array library makes them: memory, copies, events.

Each acts in the device's primary context, which CuPy, JAX and torch use too (CUDA Driver API, sections
Primary Context Management, Memory Management, Event Management and Stream Management).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from fi_backend.errors import UnsupportedError

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_NO_TIMING = 2
_Pointer = ctypes.c_void_p


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"device: expected 'cpu', as this machine has no CUDA driver ({error}); got a CUDA device."
        ) from error
    if library.cuInit(0) != 0:
        raise UnsupportedError(
            "device: expected 'cpu', as the CUDA driver finds no device; got a CUDA device."
        )
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    if (status := getattr(library, name)(*arguments)) != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


@cache
def _context(index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), _Pointer()
    try:
        _call("cuDeviceGet", ctypes.byref(device), index)
    except RuntimeError as error:
        raise UnsupportedError(
            f"device: expected a CUDA device that exists; got cuda:{index}: {error}"
        ) from error
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def _attribute(index: int, which: int) -> int:
    _context(index)
    device, value = ctypes.c_int(), ctypes.c_int()
    _call("cuDeviceGet", ctypes.byref(device), index)
    _call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return value.value


def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a device."""
    return _attribute(index, _MAJOR), _attribute(index, _MINOR)


def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of a device."""
    return _attribute(index, _MULTIPROCESSORS)


@contextmanager
def current(index: int) -> Iterator[None]:
    """Make the primary context of a device the current one."""
    _call("cuCtxPushCurrent_v2", _context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(_Pointer()))


class DeviceMemory:
    """Memory of a device, contents arbitrary; freed, once the device is done, when nobody refers to it."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index
        address = ctypes.c_uint64()
        with current(index):
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
            self.address = address.value

    def __del__(self) -> None:
        # What was not allocated need not be freed, and a process that ends may have no driver any more.
        with suppress(Exception), current(self.index):
            address = ctypes.c_uint64(self.address)
            _call("cuCtxSynchronize")
            _call("cuMemFree_v2", address)


class PinnedMemory:
    """Page-locked memory of the host, from which the device copies while the host goes on."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self._index = size, index
        address = _Pointer()
        with current(index):
            _call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(max(size, 1)), 0)
        self.address = int(address.value or 0)

    def __del__(self) -> None:
        with suppress(Exception), current(self._index):
            address = _Pointer(self.address)
            _call("cuCtxSynchronize")  # a copy from here may be under way
            _call("cuMemFreeHost", address)


class Event:
    """A point in the work of a stream."""

    def __init__(self, index: int) -> None:
        self._index, self._event = index, _Pointer()
        with current(index):
            _call("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)

    def record(self, stream: int) -> None:
        """Mark what is queued on a stream now."""
        with current(self._index):
            _call("cuEventRecord", self._event, _Pointer(stream))

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""
        with current(self._index):
            _call("cuEventSynchronize", self._event)

    def hold(self, stream: int) -> None:
        """Let a stream wait for the mark."""
        with current(self._index):
            _call("cuStreamWaitEvent", _Pointer(stream), self._event, 0)


def copy_to_device(target: DeviceMemory, source: PinnedMemory, size: int, stream: int) -> None:
    """Queue a copy of the first `size` bytes."""
    with current(target.index):
        _call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(target.address),
            _Pointer(source.address),
            ctypes.c_size_t(size),
            _Pointer(stream),
        )


def int32_at(memory: DeviceMemory, offset: int, stream: int) -> int:
    """Return a number in the memory of a device, after what a stream has queued."""
    value = ctypes.c_int32()
    with current(memory.index):
        _call("cuStreamSynchronize", _Pointer(stream))
        address = ctypes.c_uint64(memory.address + offset)
        _call("cuMemcpyDtoH_v2", ctypes.byref(value), address, ctypes.c_size_t(4))
    return value.value


def synchronize(index: int, stream: int) -> None:
    """Wait for a stream."""
    with current(index):
        _call("cuStreamSynchronize", _Pointer(stream))


def is_capturing(index: int, stream: int) -> bool:
    """Return whether a graph is being captured on a stream."""
    status = ctypes.c_int()
    with current(index):
        _call("cuStreamIsCapturing", _Pointer(stream), ctypes.byref(status))
    return status.value != 0
