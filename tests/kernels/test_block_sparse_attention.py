# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen blocks: any block size, masks of each head, causal, other layouts, other steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_batch import torch_threads
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from oracle import attention
from torch import Tensor

from fi_backend import AttentionSpec, BlockSparse, BlockSparseAttention, UnsupportedError
from fi_backend.errors import PlanError

HQ, HKV, DIM = 4, 2, 16


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(rows: int, cols: int, br: int, bc: int, num_heads: int = 1, **options: Any) -> BlockSparseAttention:
    attention_options = {key: options.pop(key) for key in ("max_blocks",) if key in options}
    spec = AttentionSpec(HQ, HKV, DIM, page_size=bc, **({"dtype": "float32", "causal": False} | options))
    return BlockSparseAttention(
        spec,
        num_rows=rows,
        num_cols=cols,
        block_rows=br,
        num_heads=num_heads,
        num_ctas=4,
        **attention_options,
    )


def visible(attn: BlockSparseAttention, mask: Tensor) -> Tensor:
    """bool [num_qo_heads, rows, cols]: what the mask of blocks means."""
    rows, cols = attn.num_rows, attn.num_cols
    by_head = mask if mask.dim() == 3 else mask[None]
    wide = by_head.repeat_interleave(attn.block_rows, 1).repeat_interleave(attn.spec.page_size, 2)
    wide = wide[:, :rows, :cols].repeat_interleave(HQ // by_head.shape[0], 0)
    if not attn.spec.causal:
        return wide
    position = torch.arange(rows) + cols - rows
    block_of = torch.arange(rows) // attn.block_rows
    first = position - torch.arange(rows) % attn.block_rows
    column = torch.arange(cols) // attn.spec.page_size
    end = torch.stack([position[block_of == b].max() for b in block_of])
    own = (column >= first[:, None] // attn.spec.page_size) & (column <= end[:, None] // attn.spec.page_size)
    return (wide | own) & (torch.arange(cols) <= position[:, None])


def check(attn: BlockSparseAttention, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, **run: Any) -> Tensor:
    lse = torch.full((attn.num_rows, HQ), math.nan)
    out = attn.run(q, k, v, out=torch.full_like(q, math.nan), lse=lse, **run)
    keys, values = (x.flatten(0, 1) if x.dim() == 4 else x for x in (k, v))
    keys, values = keys[: attn.num_cols], values[: attn.num_cols]
    for head, seen in enumerate(visible(attn, mask)):
        kv = head * HKV // HQ
        slices = q[:, head, None], keys[:, kv, None], values[:, kv, None]
        o, expected_lse = attention(*slices, causal=False, mask=seen)
        amplitude, _ = attention(*slices[:2], slices[2].abs(), causal=False, mask=seen)
        assert_close(f"head {head}", out[:, head, None], o, amplitude=amplitude)
        assert_lse_close(f"head {head}", lse[:, head, None], expected_lse)
    return out


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 9), st.integers(1, 20))


@share(60)
@given(
    sizes=SIZES,
    num_heads=st.sampled_from([1, HKV, HQ]),
    causal=st.booleans(),
    density=st.sampled_from([0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**20),
)
def test_any_block_size_and_any_mask(
    sizes: tuple[int, int, int, int], num_heads: int, causal: bool, density: float, seed: int
) -> None:
    rows, cols, br, bc = sizes
    cols = max(rows, cols) if causal else cols
    with torch_threads(1):
        attn = make(rows, cols, br, bc, num_heads, causal=causal)
        random = torch.Generator().manual_seed(seed)
        shape = (attn.row_blocks, attn.col_blocks)
        mask = torch.rand((num_heads, *shape) if num_heads > 1 else shape, generator=random) < density
        k, v = (torch.full((attn.col_blocks * bc, HKV, DIM), math.nan) for _ in range(2))
        k[:cols], v[:cols] = normal(cols, HKV, DIM, seed=1), normal(cols, HKV, DIM, seed=2)
        attn.plan(mask)
        check(attn, mask, normal(rows, HQ, DIM, seed=3), k, v)


def caches(layout: str, blocks: int, size: int) -> tuple[Tensor, Tensor]:
    """Caches of a layout, whose unused parts are NaN."""
    k, v = (normal(blocks, size, HKV, DIM, seed=seed) for seed in (1, 2))
    if layout == "hnd":
        return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))  # type: ignore[return-value]
    if layout == "k beside v":
        both = torch.full((blocks, HKV, size, 2 * DIM), math.nan)
        both[..., :DIM], both[..., DIM:] = k.transpose(1, 2), v.transpose(1, 2)
        both = both.transpose(1, 2)
        return both[..., :DIM], both[..., DIM:]
    if layout == "heads outside":
        return tuple(x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (k, v))  # type: ignore[return-value]
    padded = torch.full((2, blocks, size, HKV + 1, DIM), math.nan)
    padded[:, :, :, :HKV] = torch.stack((k, v))
    return padded[0, :, :, :HKV], padded[1, :, :, :HKV]


@pytest.mark.parametrize("layout", ["hnd", "k beside v", "heads outside", "padded"])
@pytest.mark.parametrize("num_heads", [HKV, HQ])
def test_layouts(layout: str, num_heads: int) -> None:
    attn = make(20, 60, 8, 6, num_heads)
    k, v = caches(layout, 10, 6)
    mask = normal(num_heads, 3, 10, seed=4) > 0
    attn.plan(mask, caches=(k, v))
    check(attn, mask, normal(20, HQ, DIM, seed=5), k, v)
    with pytest.raises(ValueError, match=r"^mask: expected bool"):
        attn.plan(mask[:, :1])
    check(attn, mask, normal(20, HQ, DIM, seed=5), k, v)
    attn.plan(mask)
    with pytest.raises(PlanError, match=r"^k, v: expected the layout that plan\(\) was given"):
        attn.run(normal(20, HQ, DIM), k, v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_other_dtypes(dtype: str) -> None:
    attn = make(9, 64, 4, 16, HKV, dtype="bfloat16", kv_dtype=dtype)
    kind = getattr(torch, dtype)
    k, v = (normal(64, HKV, DIM, seed=seed).to(kind) for seed in (1, 2))
    mask = normal(HKV, 3, 4, seed=4) > 0
    attn.plan(mask)
    q = normal(9, HQ, DIM, seed=3).bfloat16()
    lse = torch.empty(9, HQ)
    out = attn.run(q, k, v, lse=lse)
    for head, seen in enumerate(visible(attn, mask)):
        keys, values = (x[:, head * HKV // HQ, None].float() for x in (k, v))
        o, _ = attention(q[:, head, None], keys, values, causal=False, mask=seen)
        amplitude, _ = attention(q[:, head, None], keys, values.abs(), causal=False, mask=seen)
        assert_close(f"head {head}", out[:, head, None], o, amplitude=amplitude)


@pytest.mark.parametrize("num_heads", [1, HKV])
def test_a_mask_of_every_step_at_the_same_addresses(num_heads: int) -> None:
    """plan() and update() write where they wrote before; update() keeps a plan that was made for nothing."""
    attn = make(32, 96, 8, 8, num_heads)
    q, k, v = normal(32, HQ, DIM), normal(96, HKV, DIM, seed=1), normal(96, HKV, DIM, seed=2)
    addresses = set()
    for step in range(4):
        mask = normal(num_heads, 4, 12, seed=step) > (step - 2) * 0.7
        mask = mask if num_heads > 1 else mask[0]
        attn.plan(torch.zeros_like(mask) if step % 2 else mask)
        if step % 2:
            attn.update(mask)
        check(attn, mask, q, k, v)
        table = attn.attention._table
        assert table is not None
        assert table.indices is not None
        addresses.add((table.indices.data_ptr(), table.row_begin.data_ptr(), table.kv_lens.data_ptr()))
    assert len(addresses) == 1


def test_every_block_is_dense_attention_to_the_bit() -> None:
    """With all blocks chosen a step has the plan, and the bits, of plain attention over the same keys."""
    from fi_backend import BatchAttention, PageTable

    attn = make(24, 80, 24, 16, causal=True, max_blocks=5)
    q, k, v = normal(24, HQ, DIM), normal(80, HKV, DIM, seed=1), normal(80, HKV, DIM, seed=2)
    attn.plan(torch.ones(1, 5, dtype=torch.bool))
    plain = BatchAttention(attn.spec, max_requests=1, max_tokens=24, max_kv_len=80, num_ctas=4)
    pages = PageTable.from_block_table(torch.arange(5).int()[None], torch.tensor([80]).int(), page_size=16)
    plain.plan(torch.tensor([0, 24]).int(), pages)
    assert_bitwise_equal(
        "out", attn.run(q, k, v), plain.run(q, k.view(5, 16, HKV, DIM), v.view(5, 16, HKV, DIM))
    )


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support:UserWarning")
def test_a_matrix_in_csr_and_in_torch_formats() -> None:
    mask = normal(4, 10, seed=4) > 0
    sizes = {"num_rows": 20, "num_cols": 60, "block_rows": 5, "block_cols": 6}
    matrix = BlockSparse.from_block_mask(mask, **sizes)
    values = mask.repeat_interleave(5, 0).repeat_interleave(6, 1).float()
    bsr = BlockSparse.from_sparse(values.to_sparse_bsr((5, 6)))
    csr = BlockSparse.from_sparse(values.to_sparse_csr())
    assert torch.equal(matrix.to_block_mask(), mask)
    assert torch.equal(bsr.to_block_mask(), mask)
    assert torch.equal(csr.to_block_mask(), values.bool())
    assert (csr.block_rows, csr.block_cols) == (1, 1)
    attn = make(20, 60, 5, 6)
    q, k, v = normal(20, HQ, DIM), normal(60, HKV, DIM, seed=1), normal(60, HKV, DIM, seed=2)
    attn.plan(bsr)
    out = check(attn, mask, q, k, v)
    with pytest.raises(PlanError, match=r"^update: .*got no plan, or that of a BlockSparse"):
        attn.update(mask)
    attn.plan(mask)
    assert_bitwise_equal("as a mask", attn.run(q, k, v), out)


def run(attn: BlockSparseAttention, **change: Any) -> None:
    attn.plan(torch.ones(attn.row_blocks, attn.col_blocks, dtype=torch.bool))
    given = {"q": normal(16, HQ, DIM), "k": normal(48, HKV, DIM), "v": normal(48, HKV, DIM)} | change
    attn.run(**given)


def plan(mask: Any, **options: Any) -> None:
    make(16, 48, 8, 16, **options).plan(mask)


MATRIX = BlockSparse.from_block_mask(
    torch.ones(2, 3).bool(), num_rows=16, num_cols=47, block_rows=8, block_cols=16
)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "block_rows": (lambda: make(16, 48, 0, 16), ValueError, "^block_rows: expected 1 or more; got 0"),
    "causal": (lambda: make(16, 15, 8, 16, causal=True), ValueError, "^num_cols: .* 16 query tokens.*got 15"),
    "heads": (lambda: make(16, 48, 8, 16, 3), ValueError, "^num_heads: expected the 2 KV .* 4 query .*got 3"),
    "window": (lambda: make(16, 48, 8, 16, window_left=4), UnsupportedError, "^window_left: .*got 4"),
    "alibi": (lambda: make(16, 48, 8, 16, alibi=True), UnsupportedError, "^alibi: .*no positions"),
    "sinks": (lambda: make(16, 48, 8, 16, HKV, sinks=True), UnsupportedError, "^sinks: .*one value"),
    "custom": (lambda: make(16, 48, 8, 16, custom_mask=True), UnsupportedError, "^custom_mask: .*got True"),
    "mask type": (lambda: plan([[True]]), TypeError, "^mask: expected a torch tensor; got list"),
    "mask dtype": (
        lambda: plan(torch.ones(2, 3)), ValueError, r"^mask: expected bool \[2, 3\] or .*float32"
    ),
    "mask shape": (lambda: plan(torch.ones(3, 3).bool()), ValueError, r"^mask: .*got .*\(3, 3\)"),
    "matrix": (lambda: plan(MATRIX), PlanError, "^mask: expected num_cols = 48; got 47"),
    "matrix heads": (lambda: plan(MATRIX, num_heads=HKV), PlanError, r"^mask: .*to_block_mask\(\)"),
    "too many": (
        lambda: plan(torch.ones(2, 3).bool(), max_blocks=2), ValueError, "^mask: .*max_blocks = 2 .*got 3"
    ),
    "update": (
        lambda: make(16, 48, 8, 16, batch_invariant=True).update(torch.ones(2, 3).bool()),
        UnsupportedError, "^update: expected batch_invariant=False",
    ),
    "q rows": (lambda: run(make(16, 48, 8, 16), q=normal(15, HQ, DIM)), ValueError, r"^q: expected \[16"),
    "q dtype": (
        lambda: run(make(16, 48, 8, 16, HKV), q=normal(16, HQ, DIM).half()), ValueError, "^q: .*got .*float16"
    ),
    "out": (
        lambda: run(make(16, 48, 8, 16, HKV), out=normal(16, HQ, DIM).half()), ValueError, "^out: .*float16"
    ),
    "short k": (lambda: run(make(16, 48, 8, 16), k=normal(47, HKV, DIM)), ValueError, "^k: .*or more"),
    "tail of v": (
        lambda: run(make(16, 47, 8, 16, HKV), v=normal(47, HKV, DIM)), ValueError, r"^v: .*\[48, "
    ),
    "k heads": (
        lambda: make(16, 48, 8, 16, HQ).plan(torch.ones(2, 3).bool(), (normal(48, HQ, DIM),) * 2),
        ValueError, r"^k: expected 2 KV heads, as the spec says; got \(48, 4, 16\)",
    ),
    "one cache": (
        lambda: make(16, 48, 8, 16, HKV).plan(torch.ones(2, 3).bool(), (normal(48, HKV, DIM),)),
        ValueError, r"^caches: expected \(k, v\); got 1",
    ),
    "scales": (
        lambda: run(make(16, 48, 8, 16, HKV), k_scale=torch.ones(2)), UnsupportedError, "^k_scale: .*got 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_by_name(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
