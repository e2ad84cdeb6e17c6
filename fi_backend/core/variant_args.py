# SPDX-License-Identifier: Apache-2.0
"""The arguments of a variant: what run() is given, and the defaults, in the order of its declaration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fi_backend.core.variant import AttentionVariant

_LIMITS = {"int32": (-(2**31), 2**31 - 1), "bool": (0, 1)}


class VariantValues(NamedTuple):
    """Tensors, None where an optional one is left out, and numbers, in the order of the declaration."""

    tensors: list[Tensor | None]
    scalars: list[float]


class VariantArguments:
    """Orders the arguments of a variant's kernels on one device; tensors among the defaults move there."""

    def __init__(self, variant: AttentionVariant, device: torch.device) -> None:
        self._variant = variant
        self._defaults = {
            name: value.to(device).contiguous() if isinstance(value, Tensor) else value
            for name, value in variant.defaults.items()
        }
        needed = {name for name, tensor in variant.tensors.items() if not tensor.optional}
        self._needed = (needed | set(variant.scalars)) - set(self._defaults)
        self._without = None if self._needed else self._fill(self._defaults)

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

    def _fill(self, values: Mapping[str, float | Tensor]) -> VariantValues:
        tensors: list[Tensor | None] = []
        for name in self._variant.tensors:
            value = values.get(name)
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name}: expected a torch tensor; got {type(value).__name__}.")
            tensors.append(value)
        scalars = [_number(name, kind, values[name]) for name, kind in self._variant.scalars.items()]
        return VariantValues(tensors, scalars)


def _number(name: str, kind: str, value: object) -> float:
    expected = (int, float) if kind == "float32" else int
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
        raise TypeError(f"{name}: expected a number of type {kind}; got {value!r} of {type(value).__name__}.")
    number = float(value)
    if kind in _LIMITS and not _LIMITS[kind][0] <= number <= _LIMITS[kind][1]:
        raise ValueError(f"{name}: expected {kind}; got {value!r}, which it cannot hold.")
    if math.isnan(number):
        raise ValueError(f"{name}: expected a number; got NaN.")
    return number
