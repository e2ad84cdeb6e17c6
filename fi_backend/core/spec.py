# SPDX-License-Identifier: Apache-2.0
"""What is fixed for one attention layer: heads, dimensions, dtypes, page size and the built-in variant."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fi_backend.errors import UnsupportedError

FLOAT_DTYPES = ("float32", "float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
MAX_HEAD_DIM = 512
_MAX_INT = 2**31 - 1  # kernels count in 32 bits


def dtype_name(value: object) -> str:
    """Return the canonical name of a dtype given as a string, a torch dtype or a NumPy dtype.

    Raises TypeError when the name is not a dtype this package knows.
    """
    name = str(value).removeprefix("torch.")
    if name not in FLOAT_DTYPES + FP8_DTYPES:
        raise TypeError(
            f"dtype: expected one of {', '.join(FLOAT_DTYPES + FP8_DTYPES)}; got {value!r}. "
            "Pass the torch dtype or its name."
        )
    return name


def _positive(name: str, value: int, upper: int = _MAX_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int; got {value!r} of type {type(value).__name__}.")
    if not 1 <= value <= upper:
        raise ValueError(f"{name}: expected 1..{upper}; got {value}.")
    return value


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer, as far as it does not change from step to step.

    num_qo_heads, num_kv_heads: heads; the GQA group is their quotient, any integer.
    head_dim, head_dim_v: 1..512 elements of K and of V (head_dim_v defaults to head_dim).
    dtype: of Q and of the output: float32, float16 or bfloat16.
    kv_dtype: of the KV cache (default: dtype); fp8 caches are read with k_scale and v_scale.
    page_size: tokens of one page of the KV cache, any integer from 1 (the block column size Bc).
    scale: softmax scale (0, the default: head_dim ** -0.5).
    causal: key j is visible to query token i when j <= kv_len - q_len + i (bottom-right alignment).
    window_left: keys more than this many tokens before the query are masked; 0 keeps the query's own
        token only, -1 switches the window off.
    logits_soft_cap: c > 0 replaces a logit x by c * tanh(x / c); 0 switches it off.
    alibi: add slope[head] * (key position - query position) to the capped logit.
    sinks: one extra logit a query head in the softmax denominator.
    custom_mask: a boolean mask a request, given to plan(); it is applied on top of causal and window.
    batch_invariant: the bits of a row depend on its request's tokens and position only.

    Raises TypeError or ValueError that names the argument; UnsupportedError for combinations that do
    not exist.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int = field(default=0, kw_only=True)
    dtype: str = field(default="bfloat16", kw_only=True)
    kv_dtype: str = field(default="", kw_only=True)
    page_size: int = field(default=16, kw_only=True)
    scale: float = field(default=0.0, kw_only=True)
    causal: bool = field(default=True, kw_only=True)
    window_left: int = field(default=-1, kw_only=True)
    logits_soft_cap: float = field(default=0.0, kw_only=True)
    alibi: bool = field(default=False, kw_only=True)
    sinks: bool = field(default=False, kw_only=True)
    custom_mask: bool = field(default=False, kw_only=True)
    batch_invariant: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _positive("num_qo_heads", self.num_qo_heads)
        _positive("num_kv_heads", self.num_kv_heads)
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}); "
                f"got {self.num_qo_heads}."
            )
        _positive("head_dim", self.head_dim, MAX_HEAD_DIM)
        self._set("head_dim_v", _positive("head_dim_v", self.head_dim_v or self.head_dim, MAX_HEAD_DIM))
        _positive("page_size", self.page_size)
        self._set("dtype", dtype_name(self.dtype))
        if self.dtype not in FLOAT_DTYPES:
            raise UnsupportedError(
                f"dtype: queries and outputs are {', '.join(FLOAT_DTYPES)}; got {self.dtype}. "
                "fp8 is supported for the KV cache: pass it as kv_dtype."
            )
        self._set("kv_dtype", dtype_name(self.kv_dtype or self.dtype))
        self._set("scale", self._finite("scale", self.scale or 1.0 / math.sqrt(self.head_dim)))
        if isinstance(self.window_left, bool) or not isinstance(self.window_left, int):
            raise TypeError(f"window_left: expected an int; got {self.window_left!r}.")
        for name in ("causal", "alibi", "sinks", "custom_mask", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False; got {getattr(self, name)!r}.")
        if not -1 <= self.window_left <= _MAX_INT:
            raise ValueError(
                f"window_left: expected -1 (off) or 0..{_MAX_INT} tokens; got {self.window_left}."
            )
        self._set("logits_soft_cap", self._finite("logits_soft_cap", self.logits_soft_cap))
        if self.logits_soft_cap < 0:
            raise ValueError(f"logits_soft_cap: expected 0 (off) or > 0; got {self.logits_soft_cap}.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @staticmethod
    def _finite(name: str, value: float) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name}: expected a float; got {value!r} of type {type(value).__name__}.")
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number; got {value}.")
        return float(value)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head; they are packed into the rows of one query tile."""
        return self.num_qo_heads // self.num_kv_heads
