# SPDX-License-Identifier: Apache-2.0
"""Host memory: kernels read index arrays where they are, and run on the threads of the OpenMP runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fi_backend import env
from fi_backend.arrays.library import Library
from fi_backend.arrays.view import view
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.openmp import ensure_runtime
from fi_backend.core.kernels import OPS_MODULE
from fi_backend.core.plan import PlanLayout

_ALIGNMENT = 64  # of kernels' scratch memory, and what JAX asks of memory that it takes over

_INDEX = ("qo_indptr", "row_begin", "row_end", "kv_lens")


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Return new memory that starts at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    aligned: npt.NDArray[Any] = memory[start : start + size].view(kind).reshape(shape)
    return aligned


class HostPlace:
    """The CPU and its memory."""

    device: ClassVar[str] = "cpu"
    arch: ClassVar[str] = "cpu"
    ops_module: ClassVar[ModuleSpec] = OPS_MODULE

    def workers(self) -> int:
        """Return how many threads share a call: those of OpenMP, which OMP_NUM_THREADS sets."""
        return int(_omp_threads()())

    def call_options(self, num_ctas: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Return what run() of a module takes in the place of the grid: debug mode and threads."""
        return env.debug(), self.workers()

    def threads(self) -> tuple[int, ...]:
        """Return the argument that only the host's operators have."""
        return (self.workers(),)

    def append_option(self) -> int:
        """Return the option of append_kv(): the threads."""
        return self.workers()

    def stream_of(self, stream: object, array: object) -> int:  # noqa: ARG002
        """Return 0; raises ValueError for a stream, which a CPU does not have."""
        if stream is not None:
            raise ValueError("stream: expected None on a CPU; got one.")
        return 0

    def prepare(self, module: Any) -> None:
        """Do nothing: a loaded module can run."""

    def empty(self, size: int) -> Any:
        """Return a view of new memory, uint8 [size]."""
        return view("memory", aligned_empty((size,), np.uint8))

    def scale(self, value: float, stream: int = 0) -> Any:  # noqa: ARG002
        """Return float32 [1]."""
        return _scale(value)

    def constant(self, array: npt.NDArray[Any]) -> Any:
        """Return a view of an array of the host for use here."""
        return view("constant", np.ascontiguousarray(array))

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:  # noqa: ARG002
        """Run calls inside on a stream, which a CPU does not have."""
        yield

    def finish(self, library: Library, stream: int) -> None:
        """Do nothing: a call that has returned is done."""

    def is_capturing(self, stream: int) -> bool:  # noqa: ARG002
        """Return False: graphs belong to GPUs."""
        return False


class HostStep:
    """The plan of a step, and its index arrays where the caller has them."""

    def __init__(self, size: int) -> None:
        self._host = np.zeros(size, dtype=np.uint8)
        self.plan = view("plan", self._host)

    def host(self) -> tuple[npt.NDArray[np.uint8], Any]:
        """Return the host memory for the next plan, and a view of it."""
        return self._host, self.plan

    def publish(self, arrays: tuple[npt.NDArray[Any], ...], stream: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Return views of the arrays; the plan was written where it is read."""
        return tuple(view(name, array) for name, array in zip(_INDEX, arrays, strict=True))

    def expect_no_faults(self, layout: PlanLayout, stream: int) -> None:
        """Do nothing: on a CPU such data are refused before anything is computed."""

    def order(self, stream: int) -> None:
        """Do nothing: what was published is there."""

    def launched(self, stream: int) -> None:
        """Do nothing: a call that has returned is done."""


@cache
def _omp_threads() -> Any:
    ensure_runtime()
    return ctypes.CDLL(None).omp_get_max_threads


@lru_cache(maxsize=256)  # a call that needs one keeps it
def _scale(value: float) -> Any:
    return view("scale", np.full(1, value, dtype=np.float32))
