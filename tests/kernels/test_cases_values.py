# SPDX-License-Identifier: Apache-2.0
"""Inputs on which other engines returned wrong numbers: logits, masks, dimensions, scales, empty sets."""

from __future__ import annotations

import math

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, torch_threads
from engine_memory import Layout
from numeric import TOLERANCES, assert_bitwise_equal, assert_close, assert_lse_close
from oracle import attention
from sequences import Sequence, compute, expected

from fi_backend.core.spec import AttentionSpec

TABLES = ["block", "token", "csr", "ragged"]
FLOATS = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_t01_logits_far_from_zero_are_ordinary(dtype: str, causal: bool, q_len: int, sign: float) -> None:
    """A running maximum that started at -5e4 took rows whose logits all lay below for empty ones."""
    spec = AttentionSpec(4, 2, 128, dtype=dtype, causal=causal, scale=0.125)
    sequence = Sequence.random(spec, 90, seed=1)
    # Multiples of 1/16, so that the products are exact and differences of half a unit remain.
    q = torch.full_like(sequence.q, sign * 64)
    k = torch.full_like(sequence.k, 64)
    k[:, :, :4] += 0.5 * torch.randint(0, 3, (90, 2, 4), generator=torch.Generator().manual_seed(0))
    part = (Sequence(q, k, sequence.v), 90 - q_len, 90)
    o, expected_lse, amplitude = expected(spec, part)
    for num_ctas in (1, 8):
        [(out, lse)] = compute(spec, [part], num_ctas=num_ctas)
        assert (sign * lse > 5e4).all()
        # States are merged by their float32 lse, which near 65536 is a multiple of 2^-7.
        lost = 2.0**-6 / TOLERANCES[out.dtype].inner
        assert_close("out", out, o, amplitude=amplitude, slack=1 if num_ctas == 1 else max(1, lost))
        assert_lse_close("lse", lse, expected_lse)


@pytest.mark.parametrize(
    ("kv_dtype", "seed"), [("float32", 25), ("float32", 22), ("float8_e5m2", 23), ("float8_e5m2", 13)]
)
def test_long_float32_heads_are_as_exact_as_short_ones(kv_dtype: str, seed: int) -> None:
    """One chain of 512 products strayed by 0.68 to 0.98 of the bound here, and beyond it elsewhere."""
    spec = AttentionSpec(12, 2, 512, dtype="float32", kv_dtype=kv_dtype, page_size=1, scale=0.3, causal=False)
    state = EngineState(Batch(spec=spec, q_lens=(6,), kv_lens=(37 + seed,), costs=SPLIT_COSTS, seed=seed))
    out, _ = state.run(state.attention())
    o, _, amplitude = state.expected()
    assert_close("out", out, o, amplitude=amplitude, slack=0.5 * 0.3 * 512**0.5)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("heads", "sinks"), [((32, 8), False), ((32, 8), True), ((4, 4), False), ((6, 2), True)]
)
def test_t03_t41_more_queries_than_keys_leave_empty_rows(
    table: str, heads: tuple[int, int], sinks: bool
) -> None:
    """Rows before the first key got an lse of -49994, or +inf, instead of that of an empty set."""
    spec = AttentionSpec(*heads, 64, dtype="float32", sinks=sinks)
    batch = Batch(
        spec=spec, q_lens=(40, 5, 130), kv_lens=(7, 0, 100), layout=Layout(table=table), num_ctas=16
    )
    state = check(batch)
    _, lse = state.run(state.attention())
    out, _ = state.run(state.attention())
    for first, last in ((0, 33), (40, 45), (45, 75)):
        assert torch.isneginf(lse[first:last]).all()
        assert (out[first:last] == 0).all()
    assert torch.isfinite(lse[33:40]).all()
    assert torch.isfinite(lse[75:]).all()


@pytest.mark.parametrize(
    ("window", "q_len", "kv_len"),
    [(333, 300, 4096), (333, 100, 1000), (16, 40, 200), (0, 130, 130), (90, 130, 60)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_t04_t59_every_query_tile_has_its_own_window(
    window: int, q_len: int, kv_len: int, causal: bool
) -> None:
    """The window's left edge was the tile's: the first rows of a tile saw keys left of their window."""
    heads = (2, 1) if kv_len > 1000 else (8, 2)
    spec = AttentionSpec(*heads, 128, dtype="float32", causal=causal, window_left=window)
    check(Batch(spec=spec, q_lens=(q_len,), kv_lens=(kv_len,), num_ctas=8))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(table="ragged"), Layout(k="packed", v="packed")], ids=str
)
def test_t59_a_short_speculation_behind_a_window_with_fp8_keys(layout: Layout) -> None:
    """Eight queries, a sequence beyond the window, D 256: one (row, head) came out corrupt."""
    spec = AttentionSpec(8, 4, 256, dtype="bfloat16", kv_dtype="float8_e4m3fn", window_left=128)
    check(Batch(spec=spec, q_lens=(8, 8), kv_lens=(300, 137), layout=layout, k_scale=0.5, num_ctas=8))


@pytest.mark.parametrize("dim", [72, 80, 96, 112, 40, 20, 1, 17, 511, 512])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float8_e5m2")]
)
def test_t06_head_dimensions_off_the_powers_of_two(dim: int, dtype: str, kv_dtype: str) -> None:
    """Dimensions without a kernel ran with another one's: wrong numbers or illegal accesses."""
    for dim_v in (dim, 64, max(1, dim - 3)):
        spec = AttentionSpec(4, 2, dim, head_dim_v=dim_v, dtype=dtype, kv_dtype=kv_dtype)
        check(
            Batch(
                spec=spec, q_lens=(1, 20), kv_lens=(70, 33), layout=Layout(k="packed", v="packed"), num_ctas=4
            )
        )


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("causal", [True, False])
def test_t11_t42_empty_requests_among_others(table: str, causal: bool) -> None:
    """A request without keys left garbage or NaN; one without queries, or without either, hung at D 256."""
    for dim in (64, 256):
        spec = AttentionSpec(4, 2, dim, dtype="float32", causal=causal)
        lens = {"q_lens": (3, 0, 70, 0, 1, 4), "kv_lens": (0, 50, 90, 0, 0, 4)}
        check(Batch(spec=spec, layout=Layout(table=table), num_ctas=8, costs=SPLIT_COSTS, **lens))
        check(Batch(spec=spec, layout=Layout(table=table), q_lens=(0, 0), kv_lens=(0, 9)))
        check(Batch(spec=spec, layout=Layout(table=table), q_lens=(), kv_lens=()))


@pytest.mark.parametrize("group", [3, 4, 5, 6, 7, 12])
@pytest.mark.parametrize("invariant", [False, True])
def test_t44_packed_heads_over_several_query_tiles(group: int, invariant: bool) -> None:
    """The causal limit of a packed row was divided by the group twice: wrong from the second tile on."""
    spec = AttentionSpec(2 * group, 2, 64, dtype="float32", batch_invariant=invariant)
    check(Batch(spec=spec, q_lens=(100, 43, 2), kv_lens=(150, 43, 64), num_ctas=4, costs=SPLIT_COSTS))


@pytest.mark.parametrize("cap", [30.0, 50.0])
@pytest.mark.parametrize("table", ["block", "ragged"])
@pytest.mark.parametrize("window", [-1, 20])
def test_t46_soft_cap_and_window_hold_on_every_path(cap: float, table: str, window: int) -> None:
    """Logits of twelve times the usual size were not capped; contiguous KV forgot the window likewise."""
    spec = AttentionSpec(8, 2, 64, dtype="float32", logits_soft_cap=cap, window_left=window)
    for q_lens in ((1, 1), (30, 150)):
        state = check(
            Batch(
                spec=spec,
                q_lens=q_lens,
                kv_lens=(100, 160),
                layout=Layout(table=table),
                gain=40.0,
                num_ctas=8,
            )
        )
        o, lse, _ = state.expected()
        uncapped, _ = attention(
            state.q[q_lens[0] :], state.k[1], state.v[1], scale=spec.scale, window_left=window
        )
        assert (o[q_lens[0] :] - uncapped).abs().max() > 0.1, "the cap matters for these logits"
        assert lse.max() < cap + math.log(160)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", "float8_e4m3fn"), ("float16", "float8_e5m2"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("scales", [(0.25, 0.5), ((0.25, 2.0), (0.5, 0.125)), ((0.25,), (0.5,))])
def test_t47_scales_reach_paged_and_contiguous_caches_alike(dtype: str, kv_dtype: str, scales: tuple) -> None:
    """k_scale and v_scale were dropped; with contiguous KV the result was seven times that with pages."""
    spec = AttentionSpec(8, 2, 64, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True)
    results = []
    for table in ("block", "ragged"):
        batch = Batch(
            spec=spec, q_lens=(1, 9), kv_lens=(80, 40), layout=Layout(table=table), k_scale=scales[0],
            v_scale=scales[1], gain=8.0, num_ctas=2,
        )  # fmt: skip
        state = check(batch)
        results.append(state)
    paged, ragged = (s.run(s.attention()) for s in results)
    assert_bitwise_equal("queries of both", results[0].q, results[1].q)
    assert_bitwise_equal("out", paged[0], ragged[0])
    assert_bitwise_equal("lse", paged[1], ragged[1])


@pytest.mark.parametrize("length", [65_536, 131_072])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "bfloat16"])
def test_t49_a_needle_in_a_long_context(length: int, kv_dtype: str) -> None:
    """Over 64k tokens a short accumulator lost the low digits of the sum, and with them the needle."""
    spec = AttentionSpec(2, 1, 64, dtype="bfloat16", kv_dtype=kv_dtype)
    with torch_threads(1):
        sequence = Sequence.random(spec, length, seed=3)
        k, v = sequence.k.float() * 0.01, sequence.v.float()
        needle = length // 3
        k[needle], v[needle] = sequence.q[-1, 0].float() * 1.5, 100.0
        part = (Sequence(sequence.q, k.to(sequence.k.dtype), v.to(sequence.v.dtype)), length - 1, length)
        [(out, lse)] = compute(spec, [part], num_ctas=16)
        o, expected_lse, amplitude = expected(spec, part)
        assert o[0, 0].min() > 0.1, "the needle shows"
        assert_close("out", out, o, amplitude=amplitude)
        assert_lse_close("lse", lse, expected_lse)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t56_window_zero_is_the_own_token_and_minus_one_is_off(table: str, dtype: str) -> None:
    """An unsigned window turned -1 into a huge one or was always on; 0 is a window of one key."""
    spec = AttentionSpec(4, 2, 64, dtype=dtype, window_left=0)
    state = check(Batch(spec=spec, q_lens=(1, 50), kv_lens=(40, 60), layout=Layout(table=table), num_ctas=4))
    out, _ = state.run(state.attention())
    own = torch.cat([state.v[0][39:40], state.v[1][10:60]]).repeat_interleave(2, dim=1)
    assert_bitwise_equal("out", out, own)
    off = AttentionSpec(4, 2, 64, dtype=dtype, window_left=-1)
    wide = AttentionSpec(4, 2, 64, dtype=dtype, window_left=2**31 - 1)
    parts = [(Sequence.random(off, 200, 0), 150, 200)]
    for spec in (off, wide):
        [(out, lse)] = compute(spec, parts)
        o, expected_lse, amplitude = expected(off, parts[0])
        assert_close("out", out, o, amplitude=amplitude)
        assert_lse_close("lse", lse, expected_lse)
