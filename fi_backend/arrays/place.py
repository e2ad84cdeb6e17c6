# SPDX-License-Identifier: Apache-2.0
"""Where arrays lie and kernels run: host memory or a CUDA device."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fi_backend.arrays.host import HostPlace

if TYPE_CHECKING:
    from fi_backend.arrays.cuda import CudaPlace


def place(device: object) -> HostPlace | CudaPlace:
    """Return the place of "cpu", "cuda:1" or "cuda", which is "cuda:0".

    Raises ValueError for any other device, UnsupportedError where there is no such device or it is too old.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return _host()
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ValueError(f"device: expected 'cpu' or a CUDA device such as 'cuda:0'; got {str(device)!r}.")
    return _cuda(int(index or "0"))


@cache
def _host() -> HostPlace:
    return HostPlace()


@cache
def _cuda(index: int) -> CudaPlace:
    from fi_backend.arrays.cuda import CudaPlace

    return CudaPlace(index)
