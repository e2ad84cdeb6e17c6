# SPDX-License-Identifier: Apache-2.0
"""A variant that looks at all a value_transform is given, and what it is by definition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from variant_cases import Oracle, Request, VariantBatch, check_variant

from fi_backend import AttentionVariant, TensorParam

MIXED_VALUES = AttentionVariant(
    name="mixed_values",
    params={"weight": TensorParam("float32", ("requests", "num_kv_heads")), "spoilt": "int32"},
    defaults={"spoilt": -1},
    value_transform="""
        // What shared memory holds in place of keys that do not exist.
        const bool missing = x[0] == 0.0f && x[1] == 0.0f && x[2] == 0.0f;
        if (missing) return kv_idx % 2 == 0 ? exp(1000.0f) : log(-1.0f);
        if (kv_idx == params.spoilt) return log(-1.0f);
        const float other = x[x.size() - 1 - d] * params.weight(batch_idx, kv_head_idx);
        return x[x.size()] + x[d] + (kv_idx % 7 == 3 ? other : 0.5f * d / x.size());
    """,
    finish="return 0.5f;",
)


def _values(r: Request, args: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    size = r.v.shape[-1]
    weight = args["weight"][r.index].double()
    other = r.v.flip(-1) * weight.repeat_interleave(r.v.shape[1] // weight.numel())[None, :, None]
    ramp = (0.5 * torch.arange(size) / size).double().expand_as(r.v)
    term = torch.where((r.kv_pos % 7 == 3)[:, None, None], other, ramp)
    return r.v + term, r.v.abs() + term.abs()


def _output(r: Request, args: Mapping[str, Any], o: Tensor) -> Tensor:
    spoilt = r.q_pos >= args.get("spoilt", r.kv_pos.numel())
    return (0.5 * o).masked_fill(spoilt[:, None, None], math.nan)


ORACLE = Oracle(values=_values, output=_output)


def check_mixed_values(batch: VariantBatch, **further: int) -> None:
    """Hold MIXED_VALUES against its definition. further: spoilt, a key whose value becomes NaN."""
    random = torch.Generator().manual_seed(batch.seed + 1)
    args = {"weight": torch.randn(len(batch.q_lens), batch.heads[1], generator=random), **further}
    window = batch.options.get("window_left", -1)
    oracle = ORACLE if window < 0 else replace(ORACLE, visible=lambda r, _: r.distance >= -window)
    check_variant(MIXED_VALUES, oracle, args, batch)
