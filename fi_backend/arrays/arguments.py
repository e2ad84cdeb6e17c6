# SPDX-License-Identifier: Apache-2.0
"""Scales and the parameters of a variant, as arrays of any library."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any

from fi_backend.arrays.library import device_of
from fi_backend.arrays.view import host_view, view
from fi_backend.core.variant import AttentionVariant
from fi_backend.core.variant_args import VariantArguments

if TYPE_CHECKING:
    from fi_backend.arrays.cuda import CudaPlace
    from fi_backend.arrays.host import HostPlace


def scale_view(name: str, value: Any, place: HostPlace | CudaPlace, stream: int) -> Any:
    """Return a dequantisation scale as float32 [1] or what it is; raises TypeError naming the argument."""
    if isinstance(value, Real):
        return place.scale(float(value), stream)
    return view(name, value, stream=stream)


class ArrayArguments(VariantArguments):
    """The arguments of a variant's kernels; arrays among the defaults are copied to `place`."""

    def __init__(self, variant: AttentionVariant, place: HostPlace | CudaPlace) -> None:
        self._place = place
        self._stream = 0
        super().__init__(variant, place.device)  # type: ignore[arg-type]

    def placed(self, name: str, value: Any) -> Any:
        """Return an array among the defaults as it will be passed to kernels."""
        if hasattr(value, "__dlpack_device__") and device_of(name, value) == self._place.device != "cpu":
            return view(name, value)
        return self._place.constant(host_view(name, value))

    def expected(self, name: str, value: Any) -> Any:
        """Return an array that a call is given as kernels take it."""
        return view(name, value, stream=self._stream)

    def call(self, given: Mapping[str, Any] | None, stream: int) -> tuple[list[Any]]:
        """Return what the native function is given, in the order of the declaration; see values()."""
        self._stream = stream
        tensors, scalars = self.values(given)
        return ([*tensors, *scalars],)
