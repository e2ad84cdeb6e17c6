# SPDX-License-Identifier: Apache-2.0
"""What a DLPack capsule says of an array, read and changed before anybody else has seen it.

NumPy can describe memory of any address, but neither bfloat16 and fp8 nor another device than the CPU.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CODES: Final = {"bfloat16": (4, 16), "float8_e4m3fn": (10, 8), "float8_e5m2": (12, 8)}
"""DLPack's code and bits of dtypes that NumPy has from ml_dtypes only."""
CUDA: Final = 2  # DLDeviceType
READ_ONLY, COPIED = 1, 2
# Bytes from a capsule's pointer to its DLTensor and its flags, and inside a DLTensor (dlpack.h, version 1).
_TENSOR: Final = {b"dltensor": 0, b"dltensor_versioned": 32}
_FLAGS: Final = 24
_DEVICE, _DTYPE = 8, 20

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Owned:
    """Memory of somebody else, as NumPy is told about it."""

    def __init__(self, owner: object, interface: dict[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = interface


def bytes_at(address: int, size: int, owner: object) -> npt.NDArray[np.uint8]:
    """Return uint8 [size] over memory that lives as long as `owner`, which the array keeps. Reads nothing."""
    interface = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}
    return np.asarray(_Owned(owner, interface))


def writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of an array that NumPy takes for writable: older releases export no other."""
    if array.flags.writeable:
        return array
    interface = array.__array_interface__
    return np.asarray(_Owned(array, {**interface, "data": (interface["data"][0], False)}))


def flags(capsule: object) -> int:
    """Return READ_ONLY and COPIED, where the producer says so."""
    at, versioned = _tensor(capsule)
    return (
        ctypes.c_uint64.from_address(at - _TENSOR[b"dltensor_versioned"] + _FLAGS).value if versioned else 0
    )


def set_dtype(capsule: object, name: str) -> None:
    """Say that the elements are of another dtype of their size, one of CODES."""
    at = _tensor(capsule)[0] + _DTYPE
    code, bits = CODES[name]
    ctypes.c_uint8.from_address(at).value = code
    ctypes.c_uint8.from_address(at + 1).value = bits


def set_cuda(capsule: object, index: int) -> None:
    """Say that the memory is that of a CUDA device."""
    at = _tensor(capsule)[0] + _DEVICE
    ctypes.c_int32.from_address(at).value = CUDA
    ctypes.c_int32.from_address(at + 4).value = index


def _tensor(capsule: object) -> tuple[int, bool]:
    """The address of the DLTensor, and whether the capsule has flags."""
    kind = next(kind for kind in _TENSOR if _is_valid(capsule, kind))
    return _pointer(capsule, kind) + _TENSOR[kind], kind == b"dltensor_versioned"
