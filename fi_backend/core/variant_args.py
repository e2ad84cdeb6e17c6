# SPDX-License-Identifier: Apache-2.0
"""The arguments of a variant: what run() is given, and the defaults, in the order of its declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fi_backend.core.variant import AttentionVariant

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LIMITS = {"int32": (-(2**31), 2**31 - 1), "bool": (0, 1)}


class VariantValues(NamedTuple):
    """Tensors, None where an optional one is left out, and numbers, in the order of the declaration."""

    tensors: list[Tensor | None]
    scalars: list[float]


class VariantArguments:
    """Orders the arguments of a variant's kernels on one device; tensors among the defaults move there."""

    def __init__(self, variant: AttentionVariant, device: torch.device) -> None:
        self._variant = variant
        self._device = device
        self._defaults = {
            name: self.placed(name, value) if name in variant.tensors and value is not None else value
            for name, value in variant.defaults.items()
        }
        needed = {name for name, tensor in variant.tensors.items() if not tensor.optional}
        self._needed = (needed | set(variant.scalars)) - set(self._defaults)
        self._without = None if self._needed else self._fill(self._defaults)

    def placed(self, name: str, value: Any) -> Any:
        """Return a tensor among the defaults as it will be passed to kernels."""
        import torch

        # A package can declare defaults without torch.
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else self.expected(name, value)
        return tensor.to(self._device).contiguous()

    def expected(self, name: str, value: Any) -> Any:
        """Return a tensor that a call is given as kernels take it; raises TypeError for anything else."""
        from torch import Tensor

        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a torch tensor; got {type(value).__name__}.")
        return value

    def values(self, given: Mapping[str, float | Tensor] | None) -> VariantValues:
        """Return the values of all parameters for what a call is given.

        Raises TypeError or ValueError naming the argument when one is missing, unknown or of the wrong kind;
        dtypes, shapes and devices of tensors are checked by the kernel's binding.
        """
        if not given and self._without is not None:
            return self._without
        given = given or {}
        if not isinstance(given, Mapping):
            raise TypeError(f"variant_args: expected a dict of names; got {type(given).__name__}.")
        params = self._variant.params
        if unknown := [name for name in given if name not in params]:
            known = ", ".join(params) or "none"
            raise ValueError(
                f"variant_args: variant {self._variant.name} has the parameters {known}; got {unknown[0]!r}."
            )
        if missing := sorted(self._needed - set(given)):
            raise ValueError(
                f"variant_args: expected {', '.join(missing)}, which variant {self._variant.name} declares "
                "without a default; got none."
            )
        return self._fill({**self._defaults, **given})

    def _fill(self, values: Mapping[str, Any]) -> VariantValues:
        tensors: list[Tensor | None] = []
        for name in self._variant.tensors:
            value = values.get(name)
            is_default = value is None or value is self._defaults.get(name)
            tensors.append(value if is_default else self.expected(name, value))
        scalars = [_number(name, kind, values[name]) for name, kind in self._variant.scalars.items()]
        return VariantValues(tensors, scalars)


def _number(name: str, kind: str, value: object) -> float:
    expected = Real if kind == "float32" else Integral  # NumPy's are among them
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError(f"{name}: expected a number of type {kind}; got {value!r} of {type(value).__name__}.")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected {kind}; got {value!r}, which it cannot hold.") from None
    if kind in _LIMITS and not _LIMITS[kind][0] <= number <= _LIMITS[kind][1]:
        raise ValueError(f"{name}: expected {kind}; got {value!r}, which it cannot hold.")
    if math.isnan(number):
        raise ValueError(f"{name}: expected a number; got NaN.")
    return number
