# SPDX-License-Identifier: Apache-2.0
"""Which variant of attention a layer of an engine runs: asked for by name, or decided by a plug-in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import unsupported_reason
from fi_backend.core.variant import AttentionVariant, TensorParam
from fi_backend.core.variant_args import VariantArguments
from fi_backend.core.variant_names import find_variant
from fi_backend.errors import UnsupportedError
from fi_backend.hooks import AttentionLayer, plugins

KEY: Final = "fi_backend"
_OF_A_STEP: Final = ("requests", "tokens")
_reported: set[AttentionVariant] = set()


class Asked(NamedTuple):
    """What the user asked for: the name of a variant, or None, and its arguments, values of JSON."""

    variant: str | None = None
    args: Mapping[str, Any] = {}


class Chosen(NamedTuple):
    """What a layer runs: a variant and its checked arguments, or (None, None) for plain attention."""

    variant: AttentionVariant | None = None
    args: dict[str, float | Tensor] | None = None


def asked_for(where: str, given: object) -> Asked:
    """Read ``{"variant": name, "variant_args": {...}}``, as it stands under KEY in `where`.

    Raises TypeError or ValueError that says where what was expected.
    """
    if given is None:
        return Asked()
    where = f"{where}[{KEY!r}]"
    if not isinstance(given, Mapping):
        raise TypeError(f'{where}: expected {{"variant": name, "variant_args": {{...}}}}; got {given!r}.')
    if unknown := sorted(set(given) - {"variant", "variant_args"}):
        raise ValueError(f"{where}: expected the keys variant and variant_args; got {unknown[0]!r}.")
    name, args = given.get("variant"), given.get("variant_args") or {}
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{where}: variant: expected the name of a variant; got {name!r}.")
    if not isinstance(args, Mapping):
        raise TypeError(f"{where}: variant_args: expected an object of names and values; got {args!r}.")
    if args and name is None:
        raise ValueError(f"{where}: variant_args: expected variant with it; got none.")
    return Asked(name, args)


def find_asked(asked: Asked, spec: AttentionSpec, device: torch.device) -> AttentionVariant | None:
    """Return the variant that was asked for by name, found before weights are loaded.

    Raises ValueError that lists the names for an unknown one, UnsupportedError where the spec forbids it.
    """
    variant = find_variant(asked.variant)
    if reason := unsupported_reason(spec, device, variant):
        raise UnsupportedError(reason)
    return variant


def choose(layer: AttentionLayer, log: logging.Logger) -> Chosen:
    """Return what a layer runs: what a plug-in says, else what was asked for by name, else plain attention.

    Lists among the arguments that were given by name become tensors. log: gets one line for each variant.
    Raises TypeError, ValueError or UnsupportedError that names the layer, whoever chose, and the argument.
    """
    answer = plugins().layer_variant(layer)
    if answer is None:
        who, given = "asked for by name", layer.variant_args
        variant: AttentionVariant | str | None = layer.variant
    else:
        who, variant, given = f"plug-in {answer[0]!r}", answer[1].variant, answer[1].args
    if variant is None:
        return Chosen()
    try:
        found = find_variant(variant)
        assert found is not None, "only None stands for plain attention"
        if reason := unsupported_reason(layer.spec, layer.device, found):
            raise UnsupportedError(reason)
        if not isinstance(given, Mapping):
            raise TypeError(f"args: expected a dict of names and values; got {type(given).__name__}.")
        for name, param in found.tensors.items():
            _refuse_changing(name, param, given)
        args = _as_tensors(found, given, layer) if answer is None else dict(given)
        VariantArguments(found, layer.device).values(args)
        for name, param in found.tensors.items():
            if isinstance(value := args.get(name), Tensor):
                _check_tensor(name, param, value, layer)
                # A weight of the model may be among them, and only plain tensors are handed to kernels.
                args[name] = value.detach()
    except (TypeError, ValueError, UnsupportedError) as error:
        raise type(error)(f"attention layer {layer.name}: variant, {who}: {error}") from None
    if found not in _reported:
        _reported.add(found)
        log.info("attention layers run the variant %s, %s; the first is %s", found.name, who, layer.name)
    return Chosen(found, args)


def _as_tensors(
    variant: AttentionVariant, given: Mapping[str, Any], layer: AttentionLayer
) -> dict[str, float | Tensor]:
    args = dict(given)
    for name, value in given.items():
        if not isinstance(value, list):
            continue
        if (param := variant.tensors.get(name)) is None:
            raise TypeError(f"{name}: expected a number; got a list.")
        if layer.tensor_parallel[1] > 1 and {"num_qo_heads", "num_kv_heads"} & set(param.shape):
            raise UnsupportedError(
                f"{name}: a list does not say which heads each of {layer.tensor_parallel[1]} tensor-parallel "
                "processes has. Let a plug-in's fi_backend_layer_variant() give the part of each."
            )
        try:
            args[name] = torch.tensor(value, dtype=getattr(torch, param.dtype), device=layer.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name}: expected lists of numbers of type {param.dtype}; {error}.") from None
    return args


def _refuse_changing(name: str, param: TensorParam, given: Mapping[str, Any]) -> None:
    changing = [size for size in param.shape if size in _OF_A_STEP]
    if changing and (not param.optional or given.get(name) is not None):
        raise UnsupportedError(
            f"{name}: its shape follows the {changing[0]} of a step, and an engine has nothing new to give "
            "in a step. Declare a tensor of a fixed size that the functors index."
        )


def _check_tensor(name: str, param: TensorParam, value: Tensor, layer: AttentionLayer) -> None:
    """Refuse, before anything runs, what the binding would refuse in the first step."""
    shape = tuple(getattr(layer.spec, size) if isinstance(size, str) else size for size in param.shape)
    fits = len(shape) == value.dim() and all(
        size in (None, got) for size, got in zip(shape, value.shape, strict=True)
    )
    if str(value.dtype) != f"torch.{param.dtype}" or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected {param.dtype} [{wanted}]; got {value.dtype} {list(value.shape)}.")
    if value.device != layer.device or not value.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor on {layer.device}; got strides {value.stride()} on "
            f"{value.device}."
        )
