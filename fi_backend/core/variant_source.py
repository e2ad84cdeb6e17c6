# SPDX-License-Identifier: Apache-2.0
"""The C++ that a variant becomes, the module that compiles it, and errors that point at the user's lines."""

from __future__ import annotations

import dataclasses
import hashlib
import linecache
import re

from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.variant import FUNCTORS, SIZES, AttentionVariant
from fi_backend.errors import BuildError

_CPP = {"float16": "Float16", "bfloat16": "BFloat16", "float32": "float"}
_CPP |= {"int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "bool": "bool"}
_DLPACK = {"float16": "kFloat16", "bfloat16": "kBFloat16", "float32": "kFloat32"}
_DLPACK |= {"int32": "kInt32", "int64": "kInt64", "uint8": "kUInt8", "bool": "kBool"}
_SIZES = dict(
    zip(SIZES, ("kQoHeads", "kKvHeads", "kHeadDim", "kHeadDimV", "kRequests", "kTokens"), strict=True)
)
_FILE = "user_variant.h"
_BEGIN = "const AttentionParams& p"
# Types of what bodies see; F and Int are those of keys.
_TYPES = {"x": "const Row&", "logit": "F", "o": "float", "lse": "float&", "reduced": "float", "kv_idx": "Int"}
_ROW = "i.request, i.q_token, i.token, i.q_pos, i.qo_head, i.kv_head"
# Functor -> (template and result of the body, the function that the template calls).
_OF_KEYS = {"key_reduce", "key_transform", "key_turns", "value_transform", "logits_transform"}
_WRAPPERS = {
    "visible_range": f"""
  FI_DEVICE static KeyRange visible_keys({_BEGIN}, int32_t q_pos, int32_t kv_len) {{
    // Within what the spec lets the row see, so that no key is read that does not exist.
    const KeyRange outer = StandardVariant::visible_keys(p, q_pos, kv_len);
    KeyRange range = visible_range_body(p, Params(p), q_pos);
    if (range.begin < outer.begin) range.begin = outer.begin;
    if (range.end > outer.end) range.end = outer.end;
    if (range.end < range.begin) range.end = range.begin;
    return range;
  }}""",
    "query_reduce": f"""
  template <class Load>
  FI_DEVICE static float query_row({_BEGIN}, const Load& load, const RowIndex& i) {{
    return query_reduce_body(p, Params(p), RowView<float, Load>{{load, p.head_dim}}, {_ROW});
  }}""",
    "query_transform": f"""
  template <class Load>
  FI_DEVICE static float query_transform({_BEGIN}, const Load& load, int32_t d, const RowIndex& i,
                                         float reduced) {{
    return query_transform_body(p, Params(p), RowView<float, Load>{{load, p.head_dim}}, d, reduced, {_ROW});
  }}""",
    "key_reduce": f"""
  template <class F, class Load, class Int>
  FI_DEVICE static F key_row({_BEGIN}, const Load& load, const KeyIndexOf<Int>& i) {{
    const Params params(p);
    return for_keys<kVectorized>(load, i.kv_pos, F{{}}, p.head_dim, [&](auto row, auto kv_pos, auto one) {{
      return key_reduce_body<decltype(one)>(p, params, row, i.request, kv_pos, i.kv_head);
    }});
  }}""",
    "key_transform": f"""
  template <class F, class Load, class Int>
  FI_DEVICE static F key_transform({_BEGIN}, const Load& load, int32_t d, const KeyIndexOf<Int>& i,
                                   F reduced) {{
    const Params params(p);
    return for_keys<kVectorized>(load, i.kv_pos, reduced, p.head_dim, [&](auto row, auto kv_pos, auto one) {{
      return key_transform_body<decltype(one)>(p, params, row, d, one, i.request, kv_pos, i.kv_head);
    }});
  }}""",
    "key_turns": f"""
  template <class F, class Int>
  FI_DEVICE static F key_turns({_BEGIN}, int32_t pair, const KeyIndexOf<Int>& i) {{
    return key_turns_body<F>(p, Params(p), pair, i.request, i.kv_pos, i.kv_head);
  }}""",
    "key_turns_if": f"""
  FI_DEVICE static bool turns_keys({_BEGIN}) {{ return key_turns_if_body(p, Params(p)); }}""",
    "value_transform": f"""
  template <class F, class Load, class Int>
  FI_DEVICE static F value_transform({_BEGIN}, const Load& load, int32_t d, const KeyIndexOf<Int>& i) {{
    const Params params(p);
    return for_keys<kVectorized>(load, i.kv_pos, F{{}}, p.head_dim_v, [&](auto row, auto kv_pos, auto one) {{
      return value_transform_body<decltype(one)>(p, params, row, d, i.request, kv_pos, i.kv_head);
    }});
  }}""",
    "logits_transform": f"""
  template <class Math, class F, class Int>
  FI_DEVICE static F logits_transform({_BEGIN}, F logit, const LogitIndexOf<Int>& i) {{
#if !defined(FI_LOGITS_TRANSFORM) || FI_LOGITS_TRANSFORM
    logit = StandardVariant::logits_transform<Math>(p, logit, i);
#endif
    const Params params(p);
    return for_logits<kVectorized>(logit, i.kv_pos, [&](auto x, auto kv_pos) {{
      return logits_transform_body<decltype(x)>(p, params, x, i.request, i.q_token, i.q_pos, kv_pos,
                                                i.qo_head, i.kv_head);
    }});
  }}""",
    "logits_mask": f"""
  FI_DEVICE static bool logits_mask({_BEGIN}, const LogitIndex& i) {{
    if (StandardVariant::has_mask(p) && !StandardVariant::logits_mask(p, i)) return false;
    return logits_mask_body(p, Params(p), i.request, i.q_token, i.q_pos, i.kv_pos, i.qo_head, i.kv_head);
  }}
  FI_DEVICE static bool has_mask({_BEGIN}) {{ return true; }}""",
    "finish": f"""
  FI_DEVICE static float finish({_BEGIN}, const RowIndex& i, float& lse) {{
    const float factor = StandardVariant::finish<!kTransformsValue>(p, i, lse);
    return factor * finish_body(p, Params(p), lse, {_ROW});
  }}""",
    "output_transform": f"""
  FI_DEVICE static float output_transform({_BEGIN}, float o, int32_t d, const RowIndex& i, float lse) {{
    return output_transform_body(p, Params(p), o, d, lse, {_ROW});
  }}""",
}
_RESULTS = {"visible_range": "KeyRange", "logits_mask": "bool", "key_turns_if": "bool"}


def variant_module(module: ModuleSpec, variant: AttentionVariant) -> ModuleSpec:
    """Return `module`, which runs a spec, compiled with the functors of `variant`."""
    headers = ((f"user/{name}", str(text)) for name, text in variant.headers.items())
    return dataclasses.replace(
        module,
        name=f"{module.name}_{variant.name}",
        defines=(*module.defines, ("FI_VARIANT", "UserVariant")),
        generated=(
            *module.generated,
            (_FILE, functors(variant)),
            ("user_variant_params.h", parameters(variant)),
            *headers,
        ),
    )


def digest(module: ModuleSpec) -> str:
    """Return what tells two modules of one name apart."""
    return hashlib.sha256(repr(module.generated).encode()).hexdigest()[:16]


def functors(variant: AttentionVariant) -> str:
    """Return the header that defines the functors."""
    lines = ["#pragma once", '#include "core/functors.h"']
    lines += [f'#include "user/{name}"' for name in variant.headers]
    # A body that does not return on every path would be undefined behaviour.
    lines += ["#if defined(__CUDACC__)", "#pragma nv_diag_error 940", "#else"]
    lines += ['#pragma GCC diagnostic error "-Wreturn-type"', "#endif", "namespace fi {"]
    if variant.declarations:
        _add_text(lines, variant, "declarations", variant.declarations)
    lines += ["struct UserVariant : StandardVariant {", *_params_struct(variant)]
    flags = {
        "kVectorized": variant.vectorized,
        "kSoftmax": variant.softmax,
        "kTransformsQuery": variant.query_transform is not None,
        "kTransformsKey": variant.key_transform is not None,
        "kTurnsKeys": variant.key_turns is not None,
        "kTurnsEvenly": variant.key_turns_evenly,
        "kTurnsNeighbours": variant.key_turns_neighbours,
        "kTransformsValue": variant.value_transform is not None,
        "kTransformsOutput": variant.output_transform is not None,
        "kTransformsLogits": variant.logits_transform is not None,
        "kMasks": variant.logits_mask is not None,
        "kMaskPerHead": bool(re.search(r"head_idx", variant.logits_mask or "")) or bool(variant.declarations),
        "kShares": variant.flat_reason is None,
    }
    lines += [f"  static constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    lines += [f"  FI_DEVICE static bool has_transform({_BEGIN}) {{"]
    lines += ["    return kTransformsLogits || !kSoftmax || StandardVariant::has_transform(p);", "  }"]
    if variant.key_turns_if is None:
        lines += [f"  FI_DEVICE static bool turns_keys({_BEGIN}) {{ return true; }}"]
    if variant.value_transform is not None and variant.finish is None:
        lines += [f"  FI_DEVICE static float finish({_BEGIN}, const RowIndex& i, float& lse) {{"]
        lines += ["    return StandardVariant::finish<false>(p, i, lse);", "  }"]
    for name, body in variant.functors:
        lines += _signature(name)
        _add_text(lines, variant, name, body)
        lines += ["  }", *_WRAPPERS[name].splitlines()]
    return "\n".join([*lines, "};", "}  // namespace fi", ""])


def _signature(name: str) -> list[str]:
    of_keys = name in _OF_KEYS
    types = {**_TYPES, "reduced": "F" if of_keys else "float", "kv_idx": "Int" if of_keys else "int32_t"}
    if name == "output_transform":
        types["lse"] = "float"
    template = (["class F"] if of_keys else []) + (["class Row"] if "x" in FUNCTORS[name] else [])
    template += ["class Int"] if of_keys else []
    arguments = ["const AttentionParams& attention", "const Params& params"]
    arguments += [f"{types.get(variable, 'int32_t')} {variable}" for variable in FUNCTORS[name]]
    result = "F" if of_keys else _RESULTS.get(name, "float")
    joined = ", ".join(f"[[maybe_unused]] {argument}" for argument in arguments)
    head = [f"  template <{', '.join(template)}>"] if template else []
    return [*head, f"  FI_DEVICE static {result} {name}_body({joined}) {{", "    FI_FUNCTIONS"]


def _add_text(lines: list[str], variant: AttentionVariant, name: str, text: str) -> None:
    """Add the user's text, told to the compiler as a file of its own."""
    lines += [f'#line 1 "{variant.name}:{name}"', *text.split("\n")]
    # The line after the directive has the number that it says.
    lines.append(f'#line {len(lines) + 2} "{_FILE}"')


def _params_struct(variant: AttentionVariant) -> list[str]:
    members, initial = [], []
    for i, (name, kind) in enumerate(variant.scalars.items()):
        members.append(f"    {_CPP[kind]} {name};")
        slot = f"p.variant.scalars[{i}]"
        value = f"{slot}.real" if kind == "float32" else f"{slot}.whole"
        initial.append(f"{name}({value}{' != 0' * (kind == 'bool')})")
    for i, (name, tensor) in enumerate(variant.tensors.items()):
        members.append(f"    TensorArg<{_CPP[tensor.dtype]}, {len(tensor.shape)}> {name};")
        initial.append(f"{name}{{p.variant.tensors[{i}]}}")
    start = f" : {', '.join(initial)}" if initial else ""
    constructor = f"    FI_DEVICE explicit Params([[maybe_unused]] {_BEGIN}){start} {{}}"
    return ["  struct Params {", *members, constructor, "  };"]


def parameters(variant: AttentionVariant) -> str:
    """Return the header by which the binding checks the arguments."""
    scalars = [f'{{"{name}", {str(kind != "float32").lower()}}}' for name, kind in variant.scalars.items()]
    tensors = []
    for name, tensor in variant.tensors.items():
        sizes = [
            "kAnySize" if n is None else str(n) if isinstance(n, int) else _SIZES[n] for n in tensor.shape
        ]
        optional = str(tensor.optional).lower()
        shape = ", ".join(sizes)
        tensors.append(f'{{"{name}", {_DLPACK[tensor.dtype]}, {optional}, {len(sizes)}, {{{shape}}}}}')
    return "\n".join(
        [
            "#pragma once",
            "namespace fi::bind {",
            _table("ScalarParam", "kScalarParams", scalars),
            _table("TensorParam", "kTensorParams", tensors),
            "}  // namespace fi::bind",
            "",
        ]
    )


def _table(kind: str, name: str, rows: list[str]) -> str:
    values = f"{{{{{', '.join(rows)}}}}}" if rows else "{}"
    return f"inline constexpr std::array<{kind}, {len(rows)}> {name}{values};"


def explain(variant: AttentionVariant, error: BuildError) -> BuildError:
    """Return `error` with the places inside the variant's bodies told as lines of the user's file."""
    place = re.compile(rf"\b{variant.name}:(\w+)(?::|\()(\d+)\)?")

    def translate(match: re.Match[str]) -> str:
        found = _line_of(variant, match[1], int(match[2]))
        return match[0] if found is None else f"{variant.declared_in}:{found}"

    text = str(error)
    first = [
        place.sub(translate, line) for line in text.splitlines() if place.search(line) and "error" in line
    ]
    head = f"variant {variant.name} does not compile:\n" + "\n".join(first[:5]) + "\n" if first else ""
    return BuildError(head + place.sub(translate, text))


def _line_of(variant: AttentionVariant, functor: str, line: int) -> int | None:
    """Where line `line` of a functor's text stands in the file that made the variant, if it does."""
    body = getattr(variant, functor, None)
    source = "".join(linecache.getlines(variant.declared_in))
    if not body or body not in source:
        return None
    return source[: source.index(body)].count("\n") + line
