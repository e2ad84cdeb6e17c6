# SPDX-License-Identifier: Apache-2.0
"""Arrays as kernels take them: views of the same memory that keep it alive, with dtypes that NumPy lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fi_backend.arrays import capsule as described
from fi_backend.arrays import cuda_driver as driver
from fi_backend.arrays.library import (
    Array,
    CapturingStream,
    Library,
    current_stream,
    device_of,
    expect_array,
    library_of,
)
from fi_backend.core.index_arrays import dtype_name
from fi_backend.core.jit.ffi import tvm_ffi

RAW: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""What arrays of these dtypes are where a library does not have them: raw bits."""
_VERSION: Final = (1, 0)


def view(name: str, array: Array, *, stream: int = 0, writable: bool = False, raw: str | None = None) -> Any:
    """Return a tvm_ffi.Tensor over the memory of `array`, which it keeps alive; nothing is copied.

    name: of the argument, for errors. stream: handle of the CUDA stream on which it will be used; the array's
    library makes that stream wait for what it has queued, in a capture only for what the graph has. writable:
    whether it will be written. raw: the dtype that unsigned integers of its size are the bits of, such as
    "bfloat16" for uint16. Raises TypeError or ValueError naming the argument.
    """
    expect_array(name, array)
    dtype = dtype_name(array.dtype)  # type: ignore[attr-defined]
    retyped = dtype if dtype in RAW else raw if raw is not None and RAW.get(raw) == dtype else None
    library = library_of(array)
    if writable:
        _expect_writable(name, array, library)
    try:
        if library is Library.NUMPY:
            capsule = _numpy_capsule(array, retyped)
        else:
            if library is Library.CUPY and retyped is not None:
                array = array.view(RAW[retyped])  # type: ignore[attr-defined]
            capsule = _capsule(name, array, stream)
    except (BufferError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an array that DLPack can describe; got one of {library.value} that it cannot: "
            f"{error}"
        ) from error
    if writable and described.flags(capsule) & (described.READ_ONLY | described.COPIED):
        raise _read_only(name)
    if retyped is not None:
        described.set_dtype(capsule, retyped)
    viewed = tvm_ffi().from_dlpack(capsule)
    if any(stride < 0 for stride in viewed.strides):
        # Neither kernels nor the bounds that they are checked with count backwards.
        raise ValueError(f"{name}: expected strides >= 0; got {viewed.strides}. Copy it.")
    return viewed


def host_view(name: str, array: Array) -> npt.NDArray[Any]:
    """Return an array of integers in host memory as NumPy's, without a copy; it keeps the memory alive.

    Raises TypeError or ValueError naming the argument.
    """
    expect_array(name, array)
    if isinstance(array, np.ndarray):
        return array
    if (device := device_of(name, array)) != "cpu":
        raise ValueError(
            f"{name}: expected an array in host memory; got one on {device}. Copy it to the host first, "
            "which waits for the device."
        )
    return np.from_dlpack(view(name, array))


def host_masks(masks: Any) -> Any:
    """Return one mask of any library, or one a request, in host memory as NumPy's; None stays."""
    if hasattr(masks, "__dlpack__"):
        return host_view("custom_mask", masks)
    if not isinstance(masks, Sequence) or isinstance(masks, str):
        return masks  # None, or what packing refuses
    return [host_view(f"custom_mask[{i}]", mask) for i, mask in enumerate(masks)]


def _numpy_capsule(array: Any, retyped: str | None) -> object:
    if not array.flags.aligned:
        raise ValueError("its elements do not start at multiples of their size; copy it")
    # Neither has NumPy a name for these dtypes in DLPack, nor older releases one for read-only memory.
    plain = array if retyped is None else array.view(RAW[retyped])
    return described.writable(plain).__dlpack__()


def _capsule(name: str, array: Any, stream: int) -> object:
    keywords: dict[str, Any] = {}
    on_host = device_of(name, array) == "cpu"
    if library_of(array) is Library.JAX and (on_host or isinstance(stream, CapturingStream)):
        array.block_until_ready()  # JAX would take -1 for a stream
    elif not on_host:
        keywords["stream"] = _that_waits(array, stream)
    try:
        return array.__dlpack__(**keywords, max_version=_VERSION)
    except TypeError:  # a producer of the protocol's first version
        return array.__dlpack__(**keywords)


def _that_waits(array: Any, stream: int) -> int:
    """DLPack's number of the stream that waits for what the array's library has queued, -1 for none."""
    if isinstance(stream, CapturingStream):
        # A capture can wait for other streams of its own, and the driver refuses all else.
        current = current_stream(array)
        if current in (0, stream) or not driver.is_capturing(int(array.__dlpack_device__()[1]), current):
            return -1
    return int(stream) or 1  # 0 is ambiguous in the protocol, which numbers the default stream 1


def _expect_writable(name: str, array: Any, library: Library) -> None:
    if library is Library.JAX:
        raise ValueError(
            f"{name}: expected an array that can be written; got one of JAX, whose arrays cannot. Leave it "
            "out where a result is returned, or keep what is written in NumPy, CuPy or torch."
        )
    if library is Library.NUMPY and not array.flags.writeable:
        raise _read_only(name)


def _read_only(name: str) -> ValueError:
    return ValueError(f"{name}: expected an array that can be written; got a read-only one. Pass a copy.")
