# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings applied inside attention: the cache holds unrotated keys, so that positions may move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from fi_backend.core.variant import AttentionVariant, TensorParam

if TYPE_CHECKING:
    from torch import Tensor

_PARAMS: Final[dict[str, str | TensorParam]] = {
    "frequencies": TensorParam("float32", (None, 2)),
    "q_offset": TensorParam("int32", ("requests",), optional=True),
    "k_offset": TensorParam("int32", ("requests",), optional=True),
}
# A product of float32 loses the angle of far positions; the rest of the product and of the frequency keep it.
_TURNS = """
  template <class F>
  FI_DEVICE F rope_turns(F position, float high, float low) {
    const F product = position * high;
    F rest = fi::functions::fma(position, high, -product) + position * low;
    return (product - fi::functions::round(product)) + rest;
  }
"""
# A tensor that is not given reads as 0.
_QUERY = "const float position = float(q_pos + params.q_offset[batch_idx]);"
_KEY = "const F position = to_float(kv_idx + params.k_offset[batch_idx]);"
_WHOLE_ROW = "return 2 * params.frequencies.size(0) == attention.head_dim;"
_HALVES = """
  const int half = int(params.frequencies.size(0));
  if (d >= 2 * half) return x[d];
  const int pair = d < half ? d : d - half;
  const auto turns = rope_turns(position, params.frequencies(pair, 0), params.frequencies(pair, 1));
  const auto s = sin_turns(turns), c = cos_turns(turns);
  return d < half ? x[d] * c - x[d + half] * s : x[d] * c + x[d - half] * s;
"""
_TURNS_OF_A_KEY = (
    _KEY + "return rope_turns(position, params.frequencies(pair, 0), params.frequencies(pair, 1));"
)
_NEIGHBOURS = """
  if (d >= 2 * params.frequencies.size(0)) return x[d];
  const auto turns = rope_turns(position, params.frequencies(d / 2, 0), params.frequencies(d / 2, 1));
  const auto s = sin_turns(turns), c = cos_turns(turns);
  return d % 2 == 0 ? x[d] * c - x[d + 1] * s : x[d] * c + x[d - 1] * s;
"""


def _declare(
    name: str, rotation: str, frequencies: npt.NDArray[np.float32] | None = None
) -> AttentionVariant:
    return AttentionVariant(
        name=name,
        params=_PARAMS,
        defaults={} if frequencies is None else {"frequencies": frequencies},
        vectorized=True,
        declarations=_TURNS,
        query_transform=_QUERY + rotation,
        key_transform=_KEY + rotation,
        key_turns=_TURNS_OF_A_KEY,
        key_turns_if=_WHOLE_ROW,
        key_turns_evenly=True,
        key_turns_neighbours=rotation is _NEIGHBOURS,
    )


ROPE = _declare("rope", _HALVES)
"""Elements d and d + rotary_dim / 2 turn together (Llama, NeoX). frequencies: see rope_frequencies();
q_offset, k_offset: int32 [requests], added to the positions of queries and of keys (default: none)."""

ROPE_INTERLEAVED = _declare("rope_interleaved", _NEIGHBOURS)
"""The same of elements 2 i and 2 i + 1 (GPT-J)."""


@dataclass(frozen=True, slots=True)
class Llama31Scaling:
    """How Llama 3.1 stretches low frequencies; the fields are those of a model's `rope_scaling`."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def stretched(self, frequencies: Any) -> Any:
        """Return frequencies in radians a token, float64 of torch or NumPy, as the model was trained."""
        turns = self.original_max_position * frequencies / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        smooth = ((turns - self.low_freq_factor) / span).clip(0, 1)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


def rope_frequencies(
    rotary_dim: int, *, theta: float = 10000.0, scaling: Llama31Scaling | None = None
) -> Tensor:
    """Return float32 [rotary_dim / 2, 2]: the turns a token of each pair of elements, high and low parts.

    rotary_dim: even, at most head_dim; elements behind stay as they are. theta: the base. Raises ValueError.
    """
    import torch

    return torch.from_numpy(_frequencies(rotary_dim, theta, scaling))


def _frequencies(rotary_dim: int, theta: float, scaling: Llama31Scaling | None) -> npt.NDArray[np.float32]:
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number >= 2; got {rotary_dim}.")
    if not theta > 0:
        raise ValueError(f"theta: expected > 0; got {theta}.")
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    radians = theta**-exponents
    turns = (radians if scaling is None else scaling.stretched(radians)) / (2 * math.pi)
    high = turns.astype(np.float32)
    return np.stack((high, (turns - high).astype(np.float32)), axis=1)


def rope(
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    scaling: Llama31Scaling | None = None,
    interleaved: bool = False,
) -> AttentionVariant:
    """Return ROPE or ROPE_INTERLEAVED with the frequencies of a model; arguments as of rope_frequencies().

    All models share one compiled module for each spec, since frequencies are no part of the text.
    """
    frequencies = _frequencies(rotary_dim, theta, scaling)
    if interleaved:
        return _declare("rope_interleaved", _NEIGHBOURS, frequencies)
    return _declare("rope", _HALVES, frequencies)
