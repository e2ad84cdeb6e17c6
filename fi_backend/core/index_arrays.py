# SPDX-License-Identifier: Apache-2.0
"""The few words in which index arrays of torch and of NumPy are alike; neither library is imported for them.

A table of pages may also be a view without operators, such as a tvm_ffi.Tensor: its shape, strides and dtype
are all that anybody asks of it here.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_HOST = 1  # DLPack's DLDeviceType


def is_torch(array: Any) -> bool:
    """Return whether `array` is a torch tensor; where torch is not imported, nothing is one."""
    kind: Any = type(array)
    return _is_torch_class(kind)


@cache
def _is_torch_class(kind: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # None, too, while another thread imports it
    return tensor is not None and issubclass(kind, tensor)


def expect_array(name: str, array: object) -> None:
    """Check that `array` is one that the words below can be said of."""
    if not (is_torch(array) or hasattr(array, "__dlpack__")):
        raise TypeError(f"{name}: expected a torch tensor; got {type(array).__name__}.")


def expect_dtype(name: str, array: Any, *expected: str) -> None:
    """Check that the dtype is one of `expected`, such as "int32"."""
    if dtype_name(array.dtype) in expected:
        return
    torch = is_torch(array)
    wanted = " or ".join(f"torch.{each}" if torch else each for each in expected)
    conversion = f".to(torch.{expected[0]})" if torch else f'.astype("{expected[0]}")'
    raise TypeError(
        f"{name}: expected dtype {wanted}; got {array.dtype}. Convert it with {conversion} once, outside the "
        "step loop."
    )


@cache  # making a text of a dtype takes longer than all else here
def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch or NumPy, such as "int32"."""
    return str(dtype).removeprefix("torch.")


def expect_alike(name: str, array: object, other_name: str, other: object) -> None:
    """Check that both are torch tensors or neither is."""
    if type(array) is not type(other) and is_torch(array) != is_torch(other):
        kinds = ("a torch tensor", "an array of another library")
        expected, got = kinds if is_torch(other) else kinds[::-1]
        raise TypeError(f"{name}: expected {expected}, as {other_name} is; got {got}.")


def on_host(array: Any) -> bool:
    """Return whether the array lies in host memory."""
    if is_torch(array):
        return bool(array.device.type == "cpu")
    return isinstance(array, np.ndarray) or int(array.__dlpack_device__()[0]) == _HOST


def is_contiguous(array: Any) -> bool:
    """Return whether the elements lie side by side in the order of their indices."""
    return bool(array.is_contiguous() if is_torch(array) else array.flags.c_contiguous)


def as_numpy(array: Any) -> npt.NDArray[Any]:
    """Return an array of the host as NumPy's, over the same memory."""
    plain: npt.NDArray[Any] = array.numpy() if is_torch(array) else array
    return plain


def as_library_of(array: Any, made: npt.NDArray[Any]) -> Any:
    """Return `made` as an array of the library of `array`, over the same memory."""
    if is_torch(array):
        import torch

        return torch.from_numpy(made)
    return made


def strides_of(array: Any) -> tuple[int, ...]:
    """Return the strides in elements."""
    if is_torch(array):
        return array.stride()  # type: ignore[no-any-return]
    strides: tuple[int, ...] = array.strides
    if isinstance(array, np.ndarray):
        return tuple(stride // array.itemsize for stride in strides)
    return strides


def size_of(array: Any) -> int:
    """Return the number of elements."""
    return math.prod(array.shape)


def as_dtype(array: Any, dtype: str) -> Any:
    """Return the array in a dtype, itself where it has it already."""
    if is_torch(array):
        import torch

        return array.to(getattr(torch, dtype))
    return array.astype(dtype, copy=False)


def first_true(flags: Any) -> int | None:
    """Return the index of the first True of a vector on the host, or None."""
    found = np.flatnonzero(as_numpy(flags))
    return int(found[0]) if found.size else None
