# SPDX-License-Identifier: Apache-2.0
"""Steps on which other engines went wrong: stale plans and masks, padding, huge batches."""

from __future__ import annotations

import math

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, torch_threads
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from oracle import attention
from sequences import Sequence, expected
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_len", [1, 7, 8, 9, 63, 64, 65, 100])
@pytest.mark.parametrize("q_len", [1, 3, 17])
@pytest.mark.parametrize("causal", [True, False])
def test_t07_custom_masks_of_lengths_that_fill_no_byte(kv_len: int, q_len: int, causal: bool) -> None:
    """The packed mask was read past its end when rows did not fill whole bytes, and for the tile's tail."""
    spec = AttentionSpec(6, 2, 64, dtype="float32", custom_mask=True, causal=causal)
    check(Batch(spec=spec, q_lens=(q_len, 2, q_len), kv_lens=(kv_len, 5, 3), num_ctas=8, costs=SPLIT_COSTS))


def test_t08_a_plan_leaves_nothing_of_the_mask_before() -> None:
    """A wrapper that was planned with a mask and then without one still applied the old mask."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", custom_mask=True)
    k, v, q = normal(40, 2, 64, seed=1), normal(40, 2, 64, seed=2), normal(9, 4, 64, seed=3)
    attn = BatchAttention(spec, max_requests=2, max_tokens=9, max_kv_len=40, num_ctas=4, costs=SPLIT_COSTS)
    masks = [normal(9, 40, seed=4) > 0, torch.ones(9, 40, dtype=torch.bool), normal(9, 40, seed=5) > 0]
    starts, table = int32(0, 9), PageTable.ragged(int32(0, 40))
    for mask in masks:
        for form in ([mask], mask, mask.flatten()):
            attn.plan(starts, table, custom_mask=form)
            o, _ = attention(q, k, v, mask=mask)
            assert_close("out", attn.run(q, k, v), o, amplitude=o.abs() + 1)
    causal = BatchAttention(
        AttentionSpec(4, 2, 64, dtype="float32"), max_requests=2, max_tokens=9, max_kv_len=40
    )
    causal.plan(starts, table)
    attn.plan(starts, table, custom_mask=masks[1])
    torch.testing.assert_close(attn.run(q, k, v), causal.run(q, k, v))


@pytest.mark.parametrize("heads", [(40, 8), (4, 4), (7, 1)])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("invariant", [False, True])
def test_t10_padding_requests_of_a_captured_batch(
    heads: tuple[int, int], q_len: int, invariant: bool
) -> None:
    """Batches padded to 24 requests hold some of length 0, at which the plan failed."""
    spec = AttentionSpec(*heads, 128, dtype="bfloat16", batch_invariant=invariant)
    kv_lens = tuple(0 if n % 3 == 2 or n > 20 else 5 + 11 * n for n in range(24))
    state = check(Batch(spec=spec, q_lens=(q_len,) * 24, kv_lens=kv_lens, num_ctas=16))
    out, lse = state.run(state.attention())
    assert (out[-q_len:] == 0).all()
    assert torch.isneginf(lse[-q_len:]).all()


@pytest.mark.parametrize("page_size", [128, 256, 512, 1024])
def test_t12_pages_larger_than_a_chunk_in_a_large_batch(page_size: int) -> None:
    """The search for a chunk length counted pages and divided by zero."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=page_size)
    lens = tuple(1 + 29 * n % 700 for n in range(40))
    check(Batch(spec=spec, q_lens=(1,) * 40, kv_lens=lens, num_ctas=16, costs=SPLIT_COSTS))


@pytest.mark.parametrize("requests", [65_535, 65_536, 70_000])
def test_t15_more_requests_than_a_launch_dimension_holds(requests: int) -> None:
    """Past 65535 requests the launch failed without a word and old output stayed."""
    spec = AttentionSpec(2, 1, 8, dtype="float32", page_size=1)
    with torch_threads(2):
        k, v = normal(requests, 1, 1, 8, seed=1), normal(requests, 1, 1, 8, seed=2)
        pages = torch.randperm(requests, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        attn = BatchAttention(spec, max_requests=requests, max_tokens=requests, max_kv_len=1)
        ones = torch.ones(requests, dtype=torch.int32)
        table = PageTable.from_block_table(pages.view(-1, 1), ones, page_size=1)
        attn.plan(torch.arange(requests + 1, dtype=torch.int32), table)
        q, lse = normal(requests, 2, 8, seed=3), torch.full((requests, 2), math.nan)
        out = attn.run(q, k, v, out=torch.full((requests, 2, 8), math.nan), lse=lse)
        assert_bitwise_equal("out", out, v[pages.long(), 0].expand(-1, 2, -1))
        logits = (q.double() * k[pages.long(), 0].double()).sum(2) * spec.scale
        assert_lse_close("lse", lse, logits)


@pytest.mark.parametrize("tokens", [65_535, 65_536, 70_000])
def test_t15_more_query_tokens_than_a_launch_dimension_holds(tokens: int) -> None:
    spec = AttentionSpec(1, 1, 8, dtype="float32", causal=False)
    v = normal(3, 1, 8, seed=2)
    attn = BatchAttention(spec, max_requests=1, max_tokens=tokens, max_kv_len=3)
    attn.plan(int32(0, tokens), PageTable.ragged(int32(0, 3)))
    out = attn.run(torch.zeros(tokens, 1, 8), normal(3, 1, 8), v, out=torch.full((tokens, 1, 8), math.nan))
    torch.testing.assert_close(out, v.mean(0, keepdim=True).expand(tokens, 1, 8))


@pytest.mark.parametrize("invariant", [False, True])
def test_t31_two_plans_before_two_runs(invariant: bool) -> None:
    """The plan of the next step overwrote the one that was still to run."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", batch_invariant=invariant)
    batches = [
        Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, num_ctas=8, costs=SPLIT_COSTS, seed=n)
        for n, (q_lens, kv_lens) in enumerate([((1, 1), (300, 20)), ((40, 2, 1), (60, 2, 400))])
    ]
    states = [EngineState(batch) for batch in batches]
    plans = [state.attention() for state in states]
    alone = [state.run(attn) for state, attn in zip(states, plans, strict=True)]
    plans = [state.attention() for state in states]
    for _ in range(2):
        for state, attn, before in zip(states, plans, alone, strict=True):
            out, lse = state.run(attn)
            assert_bitwise_equal("out", out, before[0])
            assert_bitwise_equal("lse", lse, before[1])


@pytest.mark.parametrize("num_ctas", [1, 16])
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0xFF])
def test_t32_what_the_workspace_held_before_has_no_effect(num_ctas: int, byte: int) -> None:
    """With splitting off, stale entries of a reused workspace were taken for work."""
    spec = AttentionSpec(16, 2, 64, dtype="float32")
    state = EngineState(
        Batch(spec=spec, q_lens=(1, 1), kv_lens=(200, 33), num_ctas=num_ctas, costs=SPLIT_COSTS)
    )
    attn = state.attention()
    out, lse = state.run(attn)
    state.workspace.fill_(byte)
    again, lse_again = state.run(attn)
    assert_bitwise_equal("out", again, out)
    assert_bitwise_equal("lse", lse_again, lse)


def test_t33_one_object_planned_for_ever_other_distributions_of_lengths() -> None:
    """A graph captured with one long request and dummies left other distributions half covered; two layers
    with and without a window shared the metadata."""
    longest = 608
    limits = {"max_requests": 6, "max_tokens": 64, "max_kv_len": longest, "num_ctas": 8, "costs": SPLIT_COSTS}
    specs = [AttentionSpec(4, 2, 64, dtype="float32", window_left=window) for window in (-1, 50)]
    size = max(BatchAttention(spec, **limits).workspace_size() for spec in specs)
    shared = torch.full((size,), 0xFF, dtype=torch.uint8)
    layers = [BatchAttention(spec, **limits, workspace=shared) for spec in specs]
    sequences = [Sequence.random(specs[0], longest, seed=n) for n in range(6)]
    k = torch.cat([s.k for s in sequences]).view(-1, 16, 2, 64)
    v = torch.cat([s.v for s in sequences]).view(-1, 16, 2, 64)
    blocks = torch.arange(6 * longest // 16, dtype=torch.int32).view(6, -1)
    for q_lens, kv_lens in [
        ((1, 1, 1, 1, 1, 1), (600, 1, 1, 1, 1, 1)),
        ((1, 1, 1, 1, 1, 1), (100, 200, 300, 400, 500, 600)),
        ((20, 1, 0, 9), (20, 333, 0, 600)),
        ((64,), (64,)),
    ]:
        parts = [(s, n - q, n) for s, q, n in zip(sequences, q_lens, kv_lens, strict=False)]
        q = torch.cat([s.q[begin:end] for s, begin, end in parts])
        table = PageTable.from_block_table(blocks[: len(kv_lens)], int32(*kv_lens), page_size=16)
        for layer in layers:
            layer.plan(torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32), table)
        for layer in layers:
            lse = torch.full(q.shape[:2], math.nan)
            out = layer.run(q, k, v, out=torch.full_like(q, math.nan), lse=lse)
            results = [expected(layer.spec, part) for part in parts]
            o, expected_lse, amplitude = (torch.cat(x) for x in zip(*results, strict=True))
            assert_close("out", out, o, amplitude=amplitude)
            assert_lse_close("lse", lse, expected_lse)


@pytest.mark.parametrize("num_ctas", [2, 4, 16])
@pytest.mark.parametrize("q_lens", [(1, 1), (256, 3), (2, 200)])
def test_t39_every_row_of_every_sequence_is_written(num_ctas: int, q_lens: tuple[int, int]) -> None:
    """With pages, variable lengths and two splits, rows of the second sequence kept what out held before."""
    spec = AttentionSpec(4, 4, 64, dtype="bfloat16", page_size=256)
    check(Batch(spec=spec, q_lens=q_lens, kv_lens=(1024, 700), num_ctas=num_ctas, costs=SPLIT_COSTS))


def test_t57_layers_of_other_windows_heads_and_dims_in_one_step() -> None:
    """Layers of one KV cache group differ in window and in heads; the group's values were used for all."""
    layers = [
        AttentionSpec(48, 8, 64, dtype="float32"),
        AttentionSpec(64, 8, 64, dtype="float32", window_left=30),
        AttentionSpec(8, 2, 256, dtype="float32", window_left=100),
        AttentionSpec(8, 1, 512, dtype="float32"),
    ]
    batches = [
        Batch(spec=s, q_lens=(1, 20), kv_lens=(150, 40), num_ctas=8, costs=SPLIT_COSTS) for s in layers
    ]
    states = [EngineState(batch) for batch in batches]
    plans = [state.attention() for state in states]
    for _ in range(2):
        for state, attn in zip(states, plans, strict=True):
            out, lse = state.run(attn)
            o, expected_lse, amplitude = state.expected()
            assert_close("out", out, o, amplitude=amplitude)
            assert_lse_close("lse", lse, expected_lse)
