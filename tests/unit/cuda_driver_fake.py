# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver whose device memory is the host's, arrays that say they lie there, and a kernel for them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from fi_backend.arrays import AttentionSpec, BatchAttention, PageTable, cuda_driver, place
from fi_backend.arrays.capsule import set_cuda
from fi_backend.core.jit.ffi import tvm_ffi

SPEC = AttentionSpec(4, 2, 64, dtype="float16", page_size=16)


class FakeDriver:
    """The calls of fi_backend.arrays.cuda_driver: copies happen at once, events and waits are noted."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}
        self.log: list[tuple[Any, ...]] = []
        self.capturing: set[int] = set()
        self._contexts = 0

    def _set(self, reference: Any, value: int) -> int:
        reference._obj.value = value
        return 0

    def _allocate(self, reference: Any, size: int) -> int:
        memory = np.full(size + 64, 0xAB, np.uint8)
        start = memory.ctypes.data + -memory.ctypes.data % 64
        self.memory[start] = memory
        return self._set(reference, start)

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return self._set(device, index) if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        return self._set(context, 1000 + device.value)

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:  # noqa: N802
        return self._set(value, {16: 132, 75: 9, 76: 0}[which])

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self._contexts += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self._contexts -= 1
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return self._in_context()

    def _in_context(self) -> int:
        return 0 if self._contexts > 0 else 201

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:  # noqa: N802
        return self._in_context() or self._allocate(address, size.value)

    def cuMemHostAlloc(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        return self._in_context() or self._allocate(address, size.value)

    def cuMemFree_v2(self, address: Any) -> int:  # noqa: N802
        del self.memory[address.value]
        return self._in_context()

    def cuMemFreeHost(self, address: Any) -> int:  # noqa: N802
        del self.memory[address.value]
        return self._in_context()

    def cuMemcpyDtoH_v2(self, to: Any, address: Any, size: Any) -> int:  # noqa: N802
        ctypes.memmove(to, address.value, size.value)
        return self._in_context()

    def cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:  # noqa: N802
        ctypes.memmove(to.value, source.value, size.value)
        self.log.append(("copy", stream.value or 0))
        return self._in_context()

    def cuEventCreate(self, event: Any, flags: int) -> int:  # noqa: N802
        self._events = getattr(self, "_events", 0) + 1
        return self._set(event, self._events)

    def cuEventRecord(self, event: Any, stream: Any) -> int:  # noqa: N802
        self.log.append(("record", event.value, stream.value or 0))
        return self._in_context()

    def cuEventSynchronize(self, event: Any) -> int:  # noqa: N802
        self.log.append(("wait", event.value))
        return self._in_context()

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:  # noqa: N802
        if (stream.value or 0) in self.capturing:
            return 905  # of an event that was recorded outside of the capture
        self.log.append(("hold", stream.value or 0, event.value))
        return self._in_context()

    def cuStreamSynchronize(self, stream: Any) -> int:  # noqa: N802
        self.log.append(("synchronize", stream.value or 0))
        return self._in_context()

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:  # noqa: N802
        return self._set(status, int((stream.value or 0) in self.capturing))

    def cuGetErrorString(self, status: int, text: Any) -> int:  # noqa: N802
        return self._set(text, f"error {status}".encode())


class DeviceArray:
    """An array of a library that nobody knows, in the memory of a fake device."""

    def __init__(self, array: np.ndarray, index: int = 0) -> None:
        self.array, self.index = array, index
        self.shape, self.dtype = array.shape, array.dtype
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        set_cuda(capsule, self.index)
        return capsule


def contents(view: Any) -> np.ndarray:
    """What a view of a fake device's memory shows."""
    count = int(np.prod(view.shape))
    kind = np.dtype(str(view.dtype))
    memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(view.data_ptr())
    return np.frombuffer(memory, kind).reshape(view.shape).copy()


@contextmanager
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Inside, fi_backend.arrays finds this driver."""
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: fake)
    cuda_driver._context.cache_clear()
    place._cuda.cache_clear()
    yield fake
    gc.collect()
    cuda_driver._context.cache_clear()
    place._cuda.cache_clear()


def index_arrays(requests: int) -> tuple[np.ndarray, ...]:
    count = np.arange(requests + 1)
    starts, begin = count.astype(np.int32), (100 * count[:-1]).astype(np.int64)
    return starts, begin, begin + 7, (count[:-1] + 3).astype(np.int32)


class Kernel:
    """A module whose kernel writes down what it was given, and on which stream."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[int] = []
        self.prepared = 0

    def prepare(self, there: Any) -> None:
        assert there.__dlpack_device__()[0] == 2
        self.prepared += 1

    def run(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        self.streams.append(tvm_ffi().get_raw_stream(tvm_ffi().device("cuda", 1)))


def inputs() -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:
    q = np.zeros((3, 4, 64), np.float16)
    k, v = np.zeros((2, 5, 16, 2, 64), np.float16)
    return DeviceArray(q, 1), DeviceArray(k, 1), DeviceArray(v, 1), DeviceArray(np.zeros_like(q), 1)


def planned(table: DeviceArray, stream: Any = 5) -> BatchAttention:
    attention = BatchAttention(SPEC, max_requests=2, max_tokens=4, max_kv_len=64, device="cuda:1")
    lens = np.array([20, 3], np.int32)
    pages = PageTable.from_block_table(table, lens, page_size=16)
    attention.plan(np.array([0, 1, 3], np.int32), pages, stream=stream)
    return attention
