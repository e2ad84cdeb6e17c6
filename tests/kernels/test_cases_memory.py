# SPDX-License-Identifier: Apache-2.0
"""Memory on which other engines read the wrong bytes: strides, far pages, garbage that must not be read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, torch_threads
from engine_memory import Layout
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from oracle import attention, gather
from sequences import Sequence, compute, expected
from torch import Tensor
from virtual import virtual_zeros

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, table: PageTable, q_lens: list[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of one step; options go to run()."""
    longest = max([1, *table.kv_lens.tolist()])
    attn = BatchAttention(
        spec,
        max_requests=len(q_lens),
        max_tokens=q.shape[0],
        max_kv_len=longest,
        num_ctas=8,
        costs=SPLIT_COSTS,
    )
    attn.plan(torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32), table)
    lse = torch.full(q.shape[:2], math.nan)
    return attn.run(q, k, v, lse=lse, **options), lse


def expect_oracle(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: list[list[int]],
    kv_lens: list[int],
    q_lens: list[int],
) -> None:
    """Run over a block table of `pages` and compare with the oracle over the gathered tokens."""
    width = max(map(len, pages))
    rows = torch.tensor([ids + [-1] * (width - len(ids)) for ids in pages], dtype=torch.int32)
    out, lse = run(
        spec, q, k, v, PageTable.from_block_table(rows, int32(*kv_lens), page_size=spec.page_size), q_lens
    )
    start = 0
    for ids, kv_len, q_len in zip(pages, kv_lens, q_lens, strict=True):
        keys, values = gather(k, ids, kv_len), gather(v, ids, kv_len)
        rows_of = slice(start, start + q_len)
        o, expected_lse = attention(q[rows_of], keys, values, scale=spec.scale)
        amplitude, _ = attention(q[rows_of], keys, values.abs(), scale=spec.scale)
        assert_close("out", out[rows_of], o, amplitude=amplitude)
        assert_lse_close("lse", lse[rows_of], expected_lse)
        start += q_len


FAR = {
    # page stride, token stride, head stride in elements, page size, heads, D, V's offset in K, pages
    "t16 a million pages": (16_384, 512, 128, 16, 4, 128, None, [131_071, 131_072, 262_144, 1_000_000]),
    "t18 K beside V": (16_384, 256, 4096, 16, 4, 128, 128, [131_073, 262_145, 300_001, 1]),
    "t19 pages of one token": (1024, 1024, 64, 1, 16, 64, None, [8_400_000, 16_435, 4_194_304, 4_194_303]),
    "t62 layers between the pages": (2_064_384, 512, 128, 16, 4, 128, None, [1040, 1041, 2081, 3000]),
}


@pytest.mark.parametrize("case", FAR.values(), ids=FAR)
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("float32", "float8_e5m2")])
def test_t16_t18_t19_t62_pages_beyond_32_bit_offsets(case: Any, dtype: str, kv_dtype: str) -> None:
    """Page id times page stride wrapped at 2^31 or 2^32 elements: all zeros, or another request's tokens."""
    page_stride, token_stride, head_stride, page_size, heads, dim, v_offset, pages = case
    spec = AttentionSpec(2 * heads, heads, dim, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size)
    cache_dtype = getattr(torch, kv_dtype)
    count = (max(pages) + 1) * page_stride
    strides = (page_stride, token_stride, head_stride, 1)
    shape = (max(pages) + 1, page_size, heads, dim)
    memory = [virtual_zeros(count, cache_dtype) for _ in range(1 if v_offset else 2)]
    k = memory[0].as_strided(shape, strides)
    v = memory[-1].as_strided(shape, strides, v_offset or 0)
    assert max(pages) * page_stride > 2**31
    with torch_threads(1):
        for n, page in enumerate(pages):
            k[page] = normal(page_size, heads, dim, seed=n, dtype=cache_dtype)
            v[page] = normal(page_size, heads, dim, seed=50 + n, dtype=cache_dtype)
        q = normal(4, 2 * heads, dim, seed=9, dtype=getattr(torch, dtype))
        expect_oracle(spec, q, k, v, [pages, pages[2:]], [4 * page_size, max(1, 2 * page_size - 3)], [3, 1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("page_size", "lens", "dim"),
    [(4, (13,), 64), (128, (32, 64, 96, 48), 64), (16, (1, 17, 160), 128), (8, (9,), 33)],
)
@pytest.mark.parametrize("q_len", [1, 9])
def test_t21_what_lies_behind_the_last_token_has_no_effect(
    value: float, page_size: int, lens: tuple[int, ...], dim: int, q_len: int
) -> None:
    """0 * NaN is NaN: garbage behind the length, in the same page or in unused ones, spoilt whole rows."""
    spec = AttentionSpec(4, 2, dim, dtype="bfloat16", page_size=page_size)
    state = EngineState(
        Batch(spec=spec, q_lens=(q_len,) * len(lens), kv_lens=lens, num_ctas=4, costs=SPLIT_COSTS)
    )
    results = []
    for filling in (0.0, value):
        k, v = (torch.where(cache.isnan(), filling, cache) for cache in (state.k_cache, state.v_cache))
        state.k_cache, state.v_cache = k, v
        results.append(state.run(state.attention()))
        state = EngineState(state.batch)
    for clean, garbage in zip(*results, strict=True):
        assert_bitwise_equal("garbage", garbage, clean)


@pytest.mark.parametrize("window", [0, 15, 16, 100])
@pytest.mark.parametrize("q_len", [1, 8, 70])
@pytest.mark.parametrize("garbage_id", [-1, 2**31 - 1, 99_999, -(2**31)])
@pytest.mark.parametrize("debug", ["0", "1"])
def test_t22_t24_pages_left_of_the_window_are_not_read(
    window: int, q_len: int, garbage_id: int, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines free such pages: their ids turn to -1 or to another request's, their memory to NaN."""
    monkeypatch.setenv("FI_BACKEND_DEBUG", debug)
    spec = AttentionSpec(4, 2, 64, dtype="float32", window_left=window, page_size=16)
    batch = Batch(spec=spec, q_lens=(q_len, 1), kv_lens=(300, 200), num_ctas=4, costs=SPLIT_COSTS)
    with torch_threads(1):
        state = EngineState(batch)
        table = state.table.indices
        assert table is not None
        evicted = (300 - q_len - window) // 16
        assert table[0, :evicted].eq(-1).all()
        assert evicted >= 8
        table[0, :evicted] = garbage_id
        out, lse = state.run(state.attention())
        o, expected_lse, amplitude = state.expected()
        assert_close("out", out, o, amplitude=amplitude)
        assert_lse_close("lse", lse, expected_lse)


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("garbage_id", [-1, 2**31 - 1, -7])
def test_t25_a_table_without_room_behind_its_rows(page_size: int, garbage_id: int) -> None:
    """A length at the capacity of the row made kernels look one entry too far, over the end of the table."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=page_size)
    lens = (3 * page_size, 2 * page_size, 1, 0)
    k, v = normal(12, page_size, 2, 64, seed=1), normal(12, page_size, 2, 64, seed=2)
    pages = [[5, 11, 0], [7, 1], [3], []]
    q = normal(5, 4, 64, seed=3)
    rows = [ids + [garbage_id] * (3 - len(ids)) for ids in pages]
    memory = torch.tensor([n for row in rows for n in row] + [garbage_id], dtype=torch.int32)
    tables = [memory[:12].view(4, 3), memory.as_strided((4, 3), (3, 1))]
    outs = []
    for table in tables:
        rows_of = PageTable.from_block_table(table, int32(*lens), page_size=page_size)
        outs.append(run(spec, q, k, v, rows_of, [2, 1, 1, 1]))
    expect_oracle(spec, q, k, v, pages, list(lens), [2, 1, 1, 1])
    assert_bitwise_equal("out", outs[0][0], outs[1][0])
    assert (outs[0][0][4] == 0).all()


def test_t26_the_stated_length_wins_over_the_number_of_pages() -> None:
    """At a full last page the next one is reserved already; its stale tokens were taken for the request's."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=16)
    k, v = normal(6, 16, 2, 64, seed=1), normal(6, 16, 2, 64, seed=2)
    q = normal(2, 4, 64, seed=3)
    for kv_len in (15, 16, 31, 32):
        exact = -(-kv_len // 16)
        results = []
        for count in (exact, exact + 1, exact + 3):
            indptr, indices = int32(0, count), int32(4, 1, 5, 0, 3)[:count]
            table = PageTable.from_csr(indptr, indices, page_size=16, kv_lens=int32(kv_len))
            results.append(run(spec, q, k, v, table, [2]))
        for out, lse in results[1:]:
            assert_bitwise_equal("out", out, results[0][0])
            assert_bitwise_equal("lse", lse, results[0][1])


@pytest.mark.parametrize("heads", [(32, 4, 128), (6, 2, 40), (8, 8, 64)])
@pytest.mark.parametrize("q_lens", [(1, 1, 1, 1), (5, 0, 33, 2)])
def test_t27_queries_as_a_slice_of_packed_qkv(heads: tuple[int, int, int], q_lens: tuple[int, ...]) -> None:
    """The token stride of a slice was taken for heads * D: requests after the first got other rows."""
    spec = AttentionSpec(*heads, dtype="bfloat16")
    results = []
    for kind in ("plain", "qkv"):
        state = check(
            Batch(spec=spec, q_lens=q_lens, kv_lens=(70, 9, 40, 2), layout=Layout(q=kind), num_ctas=4)
        )
        results.append(state.run(state.attention()))
    assert_bitwise_equal("out", results[1][0], results[0][0])
    assert_bitwise_equal("lse", results[1][1], results[0][1])


@pytest.mark.parametrize("k", ["nhd", "hnd", "strided", "heads", "packed"])
@pytest.mark.parametrize("v", ["nhd", "hnd", "strided", "heads", "packed"])
@pytest.mark.parametrize("table", ["block", "ragged"])
def test_t29_keys_and_values_have_strides_of_their_own(k: str, v: str, table: str) -> None:
    """V was fetched with the strides of K."""
    spec = AttentionSpec(6, 2, 64, head_dim_v=48, dtype="float32")
    batch = Batch(
        spec=spec, q_lens=(1, 30), kv_lens=(50, 40), layout=Layout(table=table, k=k, v=v), num_ctas=4
    )
    check(batch)


def test_t29_a_strided_scale_is_refused_by_name() -> None:
    """A view of every second scale was read as if it were contiguous."""
    spec = AttentionSpec(4, 2, 64, dtype="bfloat16", kv_dtype="float8_e4m3fn")
    state = EngineState(Batch(spec=spec, q_lens=(1,), kv_lens=(40,)))
    attn, q = state.attention(), state.queries()
    view = torch.tensor([0.5, 77.0, 2.0, 77.0])[::2]
    with pytest.raises(ValueError, match=r"^k_scale: expected unit stride .*got 2"):
        attn.run(q, state.k_cache, state.v_cache, k_scale=view)
    with pytest.raises(ValueError, match=r"^v_scale: expected unit stride .*got 2"):
        attn.run(q, state.k_cache, state.v_cache, v_scale=view)


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize("q_len", [1, 20])
def test_t55_a_page_may_appear_twice(page_size: int, q_len: int) -> None:
    """Shared pages are read-only: twice in one request they count twice, in two requests for each."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=page_size)
    k, v = normal(9, page_size, 2, 64, seed=1), normal(9, page_size, 2, 64, seed=2)
    pages = [[3, 7, 3, 3, 1], [7, 3, 8], [3]]
    lens = [5 * page_size, max(1, 3 * page_size - 2), page_size]
    expect_oracle(spec, normal(q_len + 2, 4, 64, seed=3), k, v, pages, lens, [q_len, 1, 1])


@pytest.mark.parametrize(("which", "value"), [("k", math.nan), ("v", math.nan), ("v", -math.inf)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize(("dim", "q_len"), [(64, 1), (64, 90), (40, 7), (128, 90)])
def test_t21_a_special_value_reaches_only_the_rows_that_see_it(
    which: str, value: float, dtype: str, window: int, dim: int, q_len: int
) -> None:
    """0 * NaN again, of a token that another row sees: rows before it, or past its window, are fine."""
    spec = AttentionSpec(4, 2, dim, dtype=dtype, window_left=window)
    with torch_threads(1):
        clean = Sequence.random(spec, 100, seed=1)
        for place in (5, 63, 64, 97, 99):
            k, v = clean.k.clone(), clean.v.clone()
            (k if which == "k" else v)[place, 1, 3] = value
            part = (Sequence(clean.q, k, v), 100 - q_len, 100)
            [(out, lse)] = compute(spec, [part])
            position = torch.arange(100 - q_len, 100)
            sees = (position >= place) & ((window < 0) | (position - place <= window))
            o, expected_lse, amplitude = expected(spec, (clean, *part[1:]))
            for fine, heads in ((~sees, slice(None)), (slice(None), slice(0, 2))):
                assert_close(
                    "out", out[fine][:, heads], o[fine][:, heads], amplitude=amplitude[fine][:, heads]
                )
                assert_lse_close("lse", lse[fine][:, heads], expected_lse[fine][:, heads])
            hit = out[sees][:, 2:]
            assert not (hit if which == "k" else hit[..., 3]).isfinite().any(), "a visible one is not hidden"
