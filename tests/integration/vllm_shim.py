# SPDX-License-Identifier: Apache-2.0
"""Stands in for vLLM's compiled CPU operators where only its Python is there: enough for a dense Llama.

Another version's library does not load with the torch at hand, and a CUDA wheel has none for the CPU.
What replaces vLLM's kernels here is plain torch; its Python, which is what an adapter meets, is untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Define the operators of `torch.ops._C` that vLLM's CPU worker and a Llama call, where missing."""
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in _OPERATORS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops._C, name):
            library.define(schema)
            library.impl(name, function, "CompositeExplicitAutograd")
    _libraries.append(library)


def _slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    lengths = query_start_loc.diff()
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    position = positions[: len(rows)].long()
    slot_mapping[: len(rows)] = block_table[rows, position // block_size] * block_size + position % block_size


def _silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _rms_norm(out: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    normal = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], None, epsilon)
    out.copy_(normal if weight is None else normal * weight.float())


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    residual += x
    _rms_norm(x, residual, weight, epsilon)


def _rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin: Tensor, is_neox: bool
) -> None:
    if not is_neox:
        raise NotImplementedError("is_neox: the stand-in knows the half-split layout alone")
    cos, sin = cos_sin[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(len(cos), -1, head_size)
        first, second = heads[..., : 2 * cos.shape[-1]].float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads[..., : turned.shape[-1]] = turned


def _nothing(nodes: list[int]) -> None:
    return None


_OPERATORS: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": _nothing,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": _slot_mapping,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": _silu_and_mul,
    "rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float epsilon) -> ()": _rms_norm,
    "fused_add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()": (
        _fused_add_rms_norm
    ),
    "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin, "
    "bool is_neox) -> ()": _rotary_embedding,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(dim=-1),
}
