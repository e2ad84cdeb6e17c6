# SPDX-License-Identifier: Apache-2.0
"""Holes of the CUDA template that no built-in option fills: softmax off, transforms of queries and keys."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fi_backend.core import jit, kernels
from fi_backend.core.attention import BatchAttention
from fi_backend.core.jit.arch import cuda_arch
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIGMOID = """
#pragma once
namespace fi {
struct Sigmoid : StandardVariant {
  static constexpr bool kSoftmax = false;
  template <class Math, class F, class Int>
  FI_HOST_DEVICE static F logits_transform(const AttentionParams&, F x, const LogitIndexOf<Int>&) {
    return 1.f / (1.f + expf(-x));
  }
};
}
"""
# Neighbours (2 i, 2 i + 1) turn by position * 2^-i.
ROPE = """
#pragma once
namespace fi {
struct Rope : StandardVariant {
  static constexpr bool kTransformsQuery = true, kTransformsKey = true;
  template <class Load>
  FI_HOST_DEVICE static float turned(Load load, int32_t d, int32_t position) {
    float s, c;
    sincosf(float(position) * exp2f(-float(d / 2)), &s, &c);
    return d % 2 == 0 ? load(d) * c - load(d + 1) * s : load(d) * c + load(d - 1) * s;
  }
  template <class Math, class Load>
  FI_HOST_DEVICE static float query_transform(const AttentionParams&, Load load, int32_t d, int32_t position,
                                              int32_t) {
    return turned(load, d, position);
  }
  template <class Math, class Load>
  FI_HOST_DEVICE static float key_transform(const AttentionParams&, Load load, int32_t d, int32_t position,
                                            int32_t) {
    return turned(load, d, position);
  }
};
}
"""
Q_LENS, KV_LENS, PAGE = (1, 3, 40, 1), (700, 64, 100, 9000), 16


def with_variant(attention: BatchAttention, name: str, source: str) -> None:
    """Replace the kernel of `attention` by one compiled with a variant of the user."""
    module = kernels.cuda_attention_module(attention.spec, cuda_arch("cuda"))
    defines = tuple((key, "1" if key == "FI_LOGITS_TRANSFORM" else value) for key, value in module.defines)
    module = dataclasses.replace(
        module,
        name=f"{module.name}_{name.lower()}",
        defines=(*defines, ("FI_VARIANT", name)),
        generated=(("user_variant.h", source),),
    )
    attention._kernel = f"{module.name}@{module.arch}"
    kernels._kernels[attention._kernel] = jit.load(module).run


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """ROPE in float64; x: [tokens, heads, dim]."""
    angle = positions[:, None].double() * 2.0 ** -torch.arange(x.shape[-1] // 2, device=x.device).double()
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["Sigmoid", "Rope"])
def test_a_variant_of_the_user(name: str, kv_dtype: str) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(8, 2, 64, kv_dtype=kv_dtype, page_size=PAGE)
    tokens, requests = sum(Q_LENS), len(Q_LENS)
    attention = BatchAttention(
        spec, max_requests=requests, max_tokens=tokens, max_kv_len=max(KV_LENS), device="cuda"
    )
    with_variant(attention, name, SIGMOID if name == "Sigmoid" else ROPE)
    pages = [-(-n // PAGE) for n in KV_LENS]
    ids = torch.randperm(sum(pages)).int().split(pages)
    table = torch.full((requests, max(pages)), -1, dtype=torch.int32)
    for row, found in enumerate(ids):
        table[row, : found.numel()] = found
    dtype = getattr(torch, kv_dtype)
    k, v = (torch.randn(sum(pages), PAGE, 2, 64, device="cuda").to(dtype) for _ in range(2))
    q = torch.randn(tokens, 8, 64, device="cuda", dtype=torch.bfloat16)
    qo_indptr = torch.tensor([0, *Q_LENS]).cumsum(0).int()
    kv_lens = torch.tensor(KV_LENS, dtype=torch.int32)
    attention.plan(
        qo_indptr.cuda(),
        PageTable.from_block_table(table.cuda(), kv_lens.cuda(), page_size=PAGE),
        qo_indptr_host=qo_indptr,
        kv_lens_host=kv_lens,
    )
    out = attention.run(q, k, v)
    for request, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        begin = int(qo_indptr[request])
        positions = torch.arange(kv_len, device="cuda")
        rows = q[begin : begin + q_len].double()
        found = ids[request].cuda().long()
        keys = k[found].flatten(0, 1)[:kv_len].double()
        values = v[found].flatten(0, 1)[:kv_len].double()
        if name == "Rope":
            rows, keys = turned(rows, positions[-q_len:]), turned(keys, positions)
        logits = torch.einsum("qhd,khd->hqk", rows, keys.repeat_interleave(4, 1)) / math.sqrt(64)
        seen = positions[None] <= positions[-q_len:, None]
        if name == "Sigmoid":
            weights = logits.sigmoid() * seen
        else:
            weights = logits.masked_fill(~seen, -math.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(4, 1))
        error = (out[begin : begin + q_len].double() - expected).norm() / expected.norm()
        assert error < 1e-2, f"request {request}: {error}"
