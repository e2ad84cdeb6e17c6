# SPDX-License-Identifier: Apache-2.0
"""A user's variant of attention: its parameters and the bodies of its functors, as one declaration."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

SCALAR_TYPES = ("float32", "int32", "bool")
TENSOR_TYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "bool")
# Sizes that a call fills in.
SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "requests", "tokens")
MAX_SCALARS, MAX_TENSORS, MAX_DIMS = 8, 8, 4
# What a body can name beside its parameters, by functor.
_KEY = ("batch_idx", "kv_idx", "kv_head_idx")
_ROW = ("batch_idx", "qo_idx", "token_idx", "q_pos", "qo_head_idx", "kv_head_idx")
FUNCTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "visible_range": ("q_pos",),
        "query_reduce": ("x", *_ROW),
        "query_transform": ("x", "d", "reduced", *_ROW),
        "key_reduce": ("x", *_KEY),
        "key_transform": ("x", "d", "reduced", *_KEY),
        "key_turns": ("pair", *_KEY),
        "key_turns_if": (),
        "value_transform": ("x", "d", *_KEY),
        "logits_transform": ("logit", "batch_idx", "qo_idx", "q_pos", "kv_idx", "qo_head_idx", "kv_head_idx"),
        "logits_mask": ("batch_idx", "qo_idx", "q_pos", "kv_idx", "qo_head_idx", "kv_head_idx"),
        "finish": ("lse", *_ROW),
        "output_transform": ("o", "d", "lse", *_ROW),
    }
)
# What differs between the requests that share a prefix.
_OF_A_ROW = re.compile(r"\b(batch_idx|qo_idx|token_idx|q_pos)\b")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\.(h|hpp|cuh)")
_RESERVED = frozenset(
    re.findall(
        r"\w+",
        """alignas alignof and asm auto bool break case catch char class const constexpr continue decltype
        default delete do double else enum explicit export extern false float for friend goto if inline int
        long mutable namespace new noexcept not nullptr operator or private protected public register requires
        return short signed sizeof static struct switch template this throw true try typedef typename union
        unsigned using virtual void volatile while xor""",
    )
)


@dataclass(frozen=True)
class TensorParam:
    """A tensor that functors read: ``params.name[i]``, ``params.name(i, j, ..)``, ``params.name.size(dim)``.

    dtype: one of TENSOR_TYPES; float16 and bfloat16 read as float. shape: up to four sizes, each an int, None
    for any, or one of SIZES, which a call fills in: "tokens" are the rows of q, "requests" those of the page
    table. optional: may be left out; ``if (params.name)`` asks. Raises TypeError or ValueError.
    """

    dtype: str
    shape: tuple[int | str | None, ...]
    _: KW_ONLY
    optional: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in TENSOR_TYPES:
            raise TypeError(f"dtype: expected one of {', '.join(TENSOR_TYPES)}; got {self.dtype!r}.")
        if not isinstance(self.shape, tuple) or not 1 <= len(self.shape) <= MAX_DIMS:
            raise ValueError(f"shape: expected a tuple of 1..{MAX_DIMS} sizes; got {self.shape!r}.")
        for size in self.shape:
            if not (size is None or size in SIZES or (type(size) is int and size >= 1)):
                raise ValueError(
                    f"shape: expected sizes >= 1, None for any, or {', '.join(SIZES)}; got {size!r}."
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionVariant:
    """Attention with functors of the user, compiled for the CPU and for GPUs from one source.

    name: lower-case identifier. params: what functors read as ``params.<name>``: "float32", "int32" or "bool"
    for a number, or a TensorParam; up to eight of each. defaults: values of parameters that run() need not be
    given. softmax: False makes the transformed logits the weights themselves; outputs add up, lse is 0.
    vectorized: the bodies of key_reduce, key_transform, value_transform and logits_transform use nothing but
    operators, where() and the mathematics of csrc/core/functions.h on keys and values, so that the CPU hands
    them vectors of keys.

    The functors are bodies of C++ functions, each with a ``return``; docs/extending.md lists what they see:
    visible_range: a KeyRange outside which nothing is read. query_reduce, key_reduce: one float of a whole
    row, `reduced` below. query_transform, key_transform: element `d` of a query, of a dequantised key.
    key_turns: a promise beside key_transform that spares GPUs most of its calls: it turns elements `pair` and
    ``pair + head_dim / 2`` by so many turns, and does nothing else, wherever key_turns_if returns true.
    key_turns_neighbours: it turns elements ``2 * pair`` and ``2 * pair + 1``. key_turns_evenly: by as many
    more from each key of a request to the next, so that GPUs ask for a few keys and follow from there.
    value_transform: element `d` of a dequantised value.
    logits_transform: a logit (or a weight) of a scaled dot product. logits_mask: whether a key is seen.
    finish: a factor of a row's output; may change `lse`. output_transform: element `d` of the output.

    headers: name -> text or path, included before anything else. declarations: C++ before the functors, such
    as helper functions (mark them FI_DEVICE); ``#if defined(__CUDA_ARCH__)`` parts what only GPUs have (PTX).

    A change of text compiles a new module. Raises TypeError or ValueError naming the argument.
    """

    name: str
    params: Mapping[str, str | TensorParam] = field(default_factory=dict)
    defaults: Mapping[str, float | Tensor | npt.NDArray[Any]] = field(default_factory=dict)
    softmax: bool = True
    vectorized: bool = False
    visible_range: str | None = None
    query_reduce: str | None = None
    query_transform: str | None = None
    key_reduce: str | None = None
    key_transform: str | None = None
    key_turns: str | None = None
    key_turns_if: str | None = None
    key_turns_evenly: bool = False
    key_turns_neighbours: bool = False
    value_transform: str | None = None
    logits_transform: str | None = None
    logits_mask: str | None = None
    finish: str | None = None
    output_transform: str | None = None
    headers: Mapping[str, str | Path] = field(default_factory=dict)
    declarations: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"name: expected [a-z][a-z0-9_]*; got {self.name!r}.")
        for argument in fields(self):
            value = getattr(self, argument.name)
            if argument.name in FUNCTORS and value is not None:
                if not isinstance(value, str):
                    got = type(value).__name__
                    raise TypeError(f"{argument.name}: expected C++ text; got {got}.")
                if not re.search(r"\breturn\b", value):
                    raise ValueError(f"{argument.name}: expected a body that returns its result; got none.")
        for of, needed in (
            ("query_reduce", "query_transform"),
            ("key_reduce", "key_transform"),
            ("key_turns", "key_transform"),
            ("key_turns_if", "key_turns"),
        ):
            if getattr(self, of) is not None and getattr(self, needed) is None:
                raise ValueError(f"{of}: expected {needed} with it, which sees its result; got None.")
        if self.key_turns is not None and self.key_reduce is not None:
            raise ValueError(
                "key_turns: expected None beside key_reduce, since a key_transform that looks at a whole key "
                "does more than turn it; got both."
            )
        for promise in ("key_turns_evenly", "key_turns_neighbours"):
            value = getattr(self, promise)
            if not isinstance(value, bool):
                raise TypeError(f"{promise}: expected a bool; got {value!r}.")
            if value and self.key_turns is None:
                raise ValueError(f"{promise}: expected key_turns with it, of which it speaks; got None.")
        self._check_params()
        self._read_headers()
        object.__setattr__(self, "_declared_in", _caller())

    def _check_params(self) -> None:
        for name, param in self.params.items():
            if not name.isidentifier() or name in _RESERVED:
                raise ValueError(f"params: expected names that C++ can have; got {name!r}.")
            if not isinstance(param, TensorParam) and param not in SCALAR_TYPES:
                raise TypeError(
                    f"params[{name!r}]: expected a TensorParam or one of {', '.join(SCALAR_TYPES)}; "
                    f"got {param!r}."
                )
        for kind, found, limit in (
            ("scalars", self.scalars, MAX_SCALARS),
            ("tensors", self.tensors, MAX_TENSORS),
        ):
            if len(found) > limit:
                raise ValueError(f"params: expected at most {limit} {kind}; got {len(found)}.")
        for name in self.defaults:
            if name not in self.params:
                raise ValueError(f"defaults: expected names of params; got {name!r}.")

    def _read_headers(self) -> None:
        texts = {}
        for name, content in self.headers.items():
            if not _HEADER.fullmatch(name):
                raise ValueError(f"headers: expected a name that ends in .h, .hpp or .cuh; got {name!r}.")
            texts[name] = content.read_text() if isinstance(content, Path) else content
        object.__setattr__(self, "headers", texts)

    @cached_property
    def scalars(self) -> dict[str, str]:
        """The numbers among the parameters: name -> type."""
        return {name: param for name, param in self.params.items() if isinstance(param, str)}

    @cached_property
    def tensors(self) -> dict[str, TensorParam]:
        """The tensors among the parameters."""
        return {name: param for name, param in self.params.items() if isinstance(param, TensorParam)}

    @property
    def functors(self) -> Iterator[tuple[str, str]]:
        """The functors that are given: name, body."""
        for name in FUNCTORS:
            if (body := getattr(self, name)) is not None:
                yield name, body

    @property
    def flat_reason(self) -> str | None:
        """Why batches with the variant are planned flat whatever their requests share, or None."""
        if not self.softmax:
            return f"variant {self.name}: without softmax"
        for name in ("visible_range", "logits_mask"):
            if getattr(self, name) is not None:
                return f"variant {self.name}: {name} decides by row which keys of a prefix are visible"
        shared = (("headers", " ".join(map(str, self.headers.values()))), ("declarations", self.declarations))
        for name, text in (*self.functors, *shared):
            if found := _OF_A_ROW.search(text):
                return f"variant {self.name}: {name} depends on {found[1]}, which differs between requests"
        return None

    @property
    def declared_in(self) -> str:
        """The Python file that made the variant."""
        return str(self._declared_in)  # type: ignore[attr-defined]


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename in (__file__, "<string>"):
        frame = frame.f_back
    return frame.f_code.co_filename
