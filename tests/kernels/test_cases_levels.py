# SPDX-License-Identifier: Apache-2.0
"""Faults of other engines where states are merged and where the sparsity has blocks of its own."""

from __future__ import annotations

import math

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, check, torch_threads
from engine_memory import Layout
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_close, assert_lse_close
from oracle import attention
from sequences import Sequence, compute
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.block_sparse import BlockSparse
from fi_backend.core.merge import merge_state
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_ctas", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t50_our_lse_is_the_natural_logarithm(num_ctas: int, dtype: str) -> None:
    """States whose lse had base 2 were merged with natural ones: weights off by a tenth at 4096 keys."""
    spec = AttentionSpec(4, 2, 64, dtype=dtype, causal=False)
    whole = Sequence.random(spec, 4096, seed=1)
    halves = [
        Sequence(whole.q[:1], whole.k[half], whole.v[half]) for half in (slice(0, 1000), slice(1000, 4096))
    ]
    states = []
    for half in halves:
        padded = Sequence(half.q.expand(len(half.k), -1, -1), half.k, half.v)
        states += compute(spec, [(padded, len(half.k) - 1, len(half.k))], num_ctas=num_ctas)
    (o_a, lse_a), (o_b, lse_b) = states
    lse = torch.logaddexp(lse_a, lse_b)
    weights = [(x - lse).exp()[..., None] for x in (lse_a, lse_b)]
    by_hand = o_a.float() * weights[0] + o_b.float() * weights[1]
    o, expected_lse = attention(whole.q[:1], whole.k, whole.v, causal=False)
    assert_lse_close("lse", lse, expected_lse)
    assert_close("merged by hand", by_hand.to(o_a.dtype), o, amplitude=o.abs() + 0.1)
    merged, merged_lse = merge_state(o_a, lse_a, o_b, lse_b)
    assert_close("merged", merged, o, amplitude=o.abs() + 0.1)
    assert_lse_close("lse", merged_lse, expected_lse)


@pytest.mark.parametrize("requests", [1, 7, 100])
@pytest.mark.parametrize("prefix", [16, 160])
def test_t52_t53_a_shared_prefix_is_one_request_of_all_rows(requests: int, prefix: int) -> None:
    """The prefix level was planned with one request each instead of one for all; its rows went astray."""
    spec = AttentionSpec(4, 2, 64, dtype="float32")
    shared = Sequence.random(spec, prefix, seed=0)
    suffixes, parts = [], []
    for n in range(requests):
        own = Sequence.random(spec, 1 + n % 5, seed=n + 1)
        pairs = ((shared.q, own.q), (shared.k, own.k), (shared.v, own.v))
        suffixes.append((own, n % 5, 1 + n % 5))
        parts.append((Sequence(*(torch.cat(pair) for pair in pairs)), prefix + n % 5, prefix + n % 5 + 1))
    q = torch.cat([s.q[-1:] for s, _, _ in parts])
    level = BatchAttention(
        AttentionSpec(4, 2, 64, dtype="float32", causal=False),
        max_requests=1,
        max_tokens=requests,
        max_kv_len=prefix,
    )
    level.plan(int32(0, requests), PageTable.ragged(int32(0, prefix)))
    lse_a = torch.empty(requests, 4)
    o_a = level.run(q, shared.k, shared.v, lse=lse_a)
    o_b, lse_b = (torch.cat(x) for x in zip(*compute(spec, suffixes), strict=True))
    out, lse = merge_state(o_a, lse_a, o_b, lse_b)
    flat, flat_lse = (torch.cat(x) for x in zip(*compute(spec, parts), strict=True))
    torch.testing.assert_close(out, flat, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(lse, flat_lse, rtol=1e-6, atol=1e-5)


@share(100)
@given(st.integers(1, 3), st.integers(1, 20), st.integers(1, 30), st.integers(1, 60), st.integers(0, 2**20))
def test_t60_block_sparse_attention_of_any_block_size(
    block_rows: int, block_cols: int, rows: int, cols: int, seed: int
) -> None:
    """Blocks of 1, 2 and 3 tokens in a sequence of 6, one head: the plan crashed."""
    with torch_threads(1):
        chosen = normal(-(-rows // block_rows), -(-cols // block_cols), seed=seed) > 0
        mask = chosen.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1)[:rows, :cols]
        matrix = BlockSparse.from_mask(mask, block_rows=block_rows, block_cols=block_cols)
        spec = AttentionSpec(2, 1, 16, dtype="float32", causal=False, page_size=block_cols)
        attn = BatchAttention(
            spec,
            max_requests=max(1, len(chosen)),
            max_tokens=rows,
            max_kv_len=cols + block_cols,
            num_ctas=4,
            costs=SPLIT_COSTS,
        )
        attn.plan(matrix.qo_indptr, matrix)
        pages = -(-cols // block_cols)
        k, v = (torch.full((pages * block_cols, 1, 16), math.nan) for _ in range(2))
        k[:cols], v[:cols] = normal(cols, 1, 16, seed=1), normal(cols, 1, 16, seed=2)
        q = normal(rows, 2, 16, seed=3)
        o, expected_lse = attention(q, k[:cols], v[:cols], causal=False, mask=mask)
        paged = (pages, block_cols, 1, 16)
        for keys, values in ((k.view(paged), v.view(paged)), (k[:cols], v[:cols])):
            lse = torch.full((rows, 2), math.nan)
            out = attn.run(q, keys, values, out=torch.full_like(q, math.nan), lse=lse)
            assert_close("out", out, o, amplitude=o.abs() + 1)
            assert_lse_close("lse", lse, expected_lse)


@pytest.mark.parametrize("table", ["block", "ragged"])
def test_t60_the_smallest_matrices(table: str) -> None:
    for size in (1, 2, 3):
        spec = AttentionSpec(1, 1, 4, dtype="float32", page_size=size)
        check(Batch(spec=spec, q_lens=(6,), kv_lens=(6,), layout=Layout(table=table)))
