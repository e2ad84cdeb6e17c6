# SPDX-License-Identifier: Apache-2.0
"""A CUDA device: memory of its own for plans and scratch, and uploads of a step's host arrays."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from fi_backend import env
from fi_backend.arrays import cuda_driver as driver
from fi_backend.arrays.capsule import bytes_at, set_cuda
from fi_backend.arrays.library import CapturingStream, Library, current_stream, stream_handle
from fi_backend.arrays.view import view
from fi_backend.core.faults import faults_at, raise_faults
from fi_backend.core.jit.arch import arch_of_capability
from fi_backend.core.jit.ffi import tvm_ffi
from fi_backend.core.ops_module import cuda_ops_module
from fi_backend.core.plan import PlanLayout
from fi_backend.errors import PlanError, UnsupportedError

_SLOTS = 4
_ALIGNMENT = 64
# Libraries whose work is ordered with ours by the stream; results of others must be there when we return.
_ORDERED = (Library.CUPY, Library.TORCH)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(memory: driver.DeviceMemory, offset: int, count: int, dtype: str) -> Any:
    """A view of `count` elements of a device's memory, which it keeps."""
    kind = np.dtype(dtype)
    described = bytes_at(memory.address + offset, count * kind.itemsize, memory).view(kind).__dlpack__()
    set_cuda(described, memory.index)
    return tvm_ffi().from_dlpack(described)


class CudaPlace:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.device = f"cuda:{index}"
        self.arch = arch_of_capability(*driver.capability(index))
        self.ops_module = cuda_ops_module(self.arch)
        self._scales: dict[float, Any] = {}

    def workers(self) -> int:
        """Return the number of multiprocessors, each of which gets a CTA."""
        return driver.multiprocessors(self.index)

    def call_options(self, num_ctas: int) -> tuple[Any, ...]:
        """Return what run() of a module takes to size its grid."""
        return (num_ctas,)

    def threads(self) -> tuple[int, ...]:
        """Return nothing: only the host's operators ask for threads."""
        return ()

    def append_option(self) -> int:
        """Return the option of append_kv(): whether it waits and checks the slots."""
        return env.debug()

    def stream_of(self, stream: object, array: Any) -> int:
        """Return the handle of a stream, by default of the current one of the array's library.

        It is a CapturingStream where a graph is being captured.
        """
        if stream is not None:
            handle = stream_handle(stream)
        else:
            handle = 0 if array is None else current_stream(array)
        return CapturingStream(handle) if driver.is_capturing(self.index, handle) else handle

    def prepare(self, module: Any) -> None:
        """Load the kernels of a module on this device, which a capture forbids later."""
        with self.using(0):
            module.prepare(self.empty(1))

    def empty(self, size: int) -> Any:
        """Return a view of new memory, uint8 [size]."""
        return _view(driver.DeviceMemory(size, self.index), 0, size, "uint8")

    def scale(self, value: float, stream: int = 0) -> Any:
        """Return float32 [1]; a new value is copied here, which a capture on `stream` forbids."""
        # Nothing is dropped: captured graphs hold the addresses.
        if value not in self._scales:
            if driver.is_capturing(self.index, stream):
                raise UnsupportedError(
                    "k_scale, v_scale: expected a number that a call before the capture had, or an array; "
                    f"got {value}, which would have to be copied to the device now."
                )
            self._scales[value] = self.constant(np.full(1, value, dtype=np.float32))
        return self._scales[value]

    def constant(self, array: npt.NDArray[Any]) -> Any:
        """Return a view of a copy of an array of the host; waits for the copy."""
        source = np.ascontiguousarray(array)
        memory = driver.DeviceMemory(source.nbytes, self.index)
        pinned = driver.PinnedMemory(source.nbytes, self.index)
        bytes_at(pinned.address, source.nbytes, pinned)[:] = source.reshape(-1).view(np.uint8)
        driver.copy_to_device(memory, pinned, source.nbytes, 0)
        driver.synchronize(self.index, 0)
        described = bytes_at(memory.address, source.nbytes, memory).view(source.dtype).reshape(source.shape)
        capsule = described.__dlpack__()
        set_cuda(capsule, self.index)
        return tvm_ffi().from_dlpack(capsule)

    def using(self, stream: int) -> AbstractContextManager[Any]:
        """Run calls inside on a stream."""
        ffi = tvm_ffi()
        return ffi.use_raw_stream(ffi.device("cuda", self.index), stream)  # type: ignore[no-any-return]

    def finish(self, library: Library, stream: int) -> None:
        """Wait for a stream where the library of the results would not, unless a graph is being captured."""
        if library not in _ORDERED and not self.is_capturing(stream):
            driver.synchronize(self.index, stream)

    def is_capturing(self, stream: int) -> bool:
        """Return whether a graph is being captured on a stream, as stream_of() saw it."""
        return isinstance(stream, CapturingStream)


class CudaStep:
    """The plan of a step and its index arrays, at addresses that never move.

    size: bytes of a plan. The host writes slots of pinned memory in turn, each copied on the caller's stream
    and written again once its copy is through. Uploads and launches follow each other whatever their streams,
    since they share the plan and scratch memory; those of a graph follow what their stream has queued.
    """

    def __init__(self, size: int, max_requests: int, index: int) -> None:
        self._index, self._size = index, size
        # qo_indptr, row_begin, row_end, kv_lens
        counts = ((max_requests + 1, "int32"), (max_requests, "int64"), (max_requests, "int64"))
        offset, self._sections = _aligned(size), []
        for count, dtype in (*counts, (max_requests, "int32")):
            self._sections.append((offset, dtype))
            offset += _aligned(count * np.dtype(dtype).itemsize)
        self._total = offset
        self._memory = driver.DeviceMemory(offset, index)
        self.plan = _view(self._memory, 0, size, "uint8")
        self._slots = [driver.PinnedMemory(offset, index) for _ in range(_SLOTS)]
        self._bytes = [bytes_at(slot.address, offset, slot) for slot in self._slots]
        for each in self._bytes:
            each[:] = 0
        self._events = [driver.Event(index) for _ in range(_SLOTS)]
        self._launched = driver.Event(index)
        self._used = [False] * _SLOTS
        self._next = 0
        self._last: tuple[driver.Event, int] | None = None
        self._views: dict[int, tuple[Any, ...]] = {}

    def host(self) -> tuple[npt.NDArray[np.uint8], Any]:
        """Return the host memory for the next plan, and a view of it; waits if all slots are being copied."""
        if self._used[self._next]:
            self._events[self._next].synchronize()
        memory = self._bytes[self._next][: self._size]
        return memory, view("plan", memory)

    def publish(self, arrays: tuple[npt.NDArray[Any], ...], stream: int) -> tuple[Any, ...]:
        """Queue the upload of `host` and of the arrays, and return views of where they will be.

        Raises PlanError while a graph is being captured: its replays would copy the slot's later contents.
        """
        if isinstance(stream, CapturingStream):
            raise PlanError(
                "plan(): expected a call outside of the capture of a graph, and one before each replay; got "
                "one inside, whose copy from the host the graph would repeat."
            )
        at = self._next
        for (offset, dtype), array in zip(self._sections, arrays, strict=True):
            target = self._bytes[at][offset : offset + array.nbytes].view(dtype)
            target[:] = array
        self.order(stream)
        driver.copy_to_device(self._memory, self._slots[at], self._total, stream)
        self._events[at].record(stream)
        self._used[at] = True
        self._last = self._events[at], stream
        self._next = (at + 1) % _SLOTS
        requests = arrays[-1].shape[0]
        if requests not in self._views:
            shapes = (requests + 1, requests, requests, requests)
            sections = zip(self._sections, shapes, strict=True)
            self._views[requests] = tuple(
                _view(self._memory, offset, count, dtype) for (offset, dtype), count in sections
            )
        return self._views[requests]

    def expect_no_faults(self, layout: PlanLayout, stream: int) -> None:
        """In debug mode, wait for the launches and raise ValueError for what they met on the device."""
        if env.debug() and not isinstance(stream, CapturingStream):
            raise_faults(driver.int32_at(self._memory, faults_at(layout), stream))

    def order(self, stream: int) -> None:
        """Let a stream wait for the last upload or launch, if that is on another one.

        Does nothing in a capture, where the driver refuses such waits, and a replay would not repeat them.
        """
        if self._last is not None and self._last[1] != stream and not isinstance(stream, CapturingStream):
            self._last[0].hold(stream)

    def launched(self, stream: int) -> None:
        """Note a launch for order()."""
        if not isinstance(stream, CapturingStream):
            self._launched.record(stream)
            self._last = self._launched, stream
