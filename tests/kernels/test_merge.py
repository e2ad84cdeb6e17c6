# SPDX-License-Identifier: Apache-2.0
"""⊕ against float64: special values, aliasing, masks, strides, and the ordered fold."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import examples
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from union import exact_union, states

from fi_backend.core.merge import merge_state, merge_states

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", [1.5, -0.0, INF, -INF, math.nan])
def test_empty_side_leaves_the_bits_of_the_other(dtype: torch.dtype, content: float) -> None:
    o, lse = states(3, 1, 2, 37, dtype)
    full, full_lse = o[:, 0].clone(), lse[:, 0].clone()
    full[0, 0, :3] = torch.tensor([-0.0, INF, 1e-7]).to(dtype)
    empty, empty_lse = torch.full_like(full, content), torch.full_like(full_lse, -INF)
    for left, right in (((full, full_lse), (empty, empty_lse)), ((empty, empty_lse), (full, full_lse))):
        out, out_lse = merge_state(*left, *right)
        assert_bitwise_equal("out", out, full)
        assert_bitwise_equal("lse", out_lse, full_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", [1.5, math.nan])
@pytest.mark.parametrize("parts", [0, 1, 2, 5])
def test_union_of_empty_sets_is_empty(dtype: torch.dtype, content: float, parts: int) -> None:
    o = torch.full((4, parts, 3, 20), content, dtype=dtype)
    out, lse = merge_states(o, torch.full((4, parts, 3), -INF))
    assert_bitwise_equal("out", out, torch.zeros(4, 3, 20, dtype=dtype))
    assert_bitwise_equal("lse", lse, torch.full((4, 3), -INF))


@pytest.mark.parametrize("top", [-1e5, -5e4, -1e30, 0.0, 5e4, 1e30])
def test_large_logarithms_neither_overflow_nor_vanish(top: float) -> None:
    o, lse = states(8, 2, 2, 64, torch.float32)
    lse = (lse + torch.tensor(top)).contiguous()
    out, out_lse = merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1])
    expected, expected_lse, amplitude = exact_union(o, lse)
    assert_close("out", out, expected, amplitude=amplitude)
    assert_lse_close("lse", out_lse, expected_lse)


def test_side_far_below_has_no_weight() -> None:
    o, _ = states(1, 2, 1, 16, torch.float32)
    out, lse = merge_state(o[:, 0], torch.zeros(1, 1), o[:, 1], torch.full((1, 1), -1e4))
    assert_bitwise_equal("out", out, o[:, 0])
    assert_bitwise_equal("lse", lse, torch.zeros(1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_a_visible_set_propagates(dtype: torch.dtype) -> None:
    o, lse = states(2, 2, 1, 16, dtype)
    o[0, 1, 0, 3] = math.nan
    out, out_lse = merge_states(o, lse)
    expected, expected_lse, amplitude = exact_union(o, lse)
    assert math.isnan(out[0, 0, 3]), "the NaN is lost"
    assert_close("out", out, expected, amplitude=amplitude)
    assert_lse_close("lse", out_lse, expected_lse)


@given(
    n=st.integers(0, 9),
    parts=st.integers(1, 6),
    heads=st.integers(1, 5),
    dim=st.integers(1, 140) | st.sampled_from([256, 512]),
    dtype=st.sampled_from(DTYPES),
    empty=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@examples.share(150)
def test_random_unions(
    n: int, parts: int, heads: int, dim: int, dtype: torch.dtype, empty: float, seed: int
) -> None:
    o, lse = states(n, parts, heads, dim, dtype, seed)
    lse = torch.where(torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < empty, -INF, lse)
    expected, expected_lse, amplitude = exact_union(o, lse)
    out, out_lse = merge_states(o, lse)
    assert_close("out", out, expected, amplitude=amplitude)
    assert_lse_close("lse", out_lse, expected_lse)
    # float32 keeps the state between steps, so there the fold and its single steps agree bit for bit.
    if dtype is torch.float32:
        first, *rest = zip(o.unbind(1), lse.unbind(1), strict=True)
        empty_state = (torch.zeros(n, heads, dim), torch.full((n, heads), -INF))
        folded, folded_lse = reduce(lambda a, b: merge_state(*a, *b), rest, merge_state(*empty_state, *first))
        assert_bitwise_equal("out", out, folded)
        assert_bitwise_equal("lse", out_lse, folded_lse)


@pytest.mark.parametrize("target", ["a", "b"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(target: str, dtype: torch.dtype) -> None:
    o, lse = states(70, 2, 4, 130, dtype)
    a, lse_a, b, lse_b = o[:, 0].clone(), lse[:, 0].clone(), o[:, 1].clone(), lse[:, 1].clone()
    expected, expected_lse = merge_state(a, lse_a, b, lse_b)
    out, out_lse = (a, lse_a) if target == "a" else (b, lse_b)
    returned = merge_state(a, lse_a, b, lse_b, out=out, lse=out_lse)
    assert returned[0] is out
    assert returned[1] is out_lse
    assert_bitwise_equal("out", out, expected)
    assert_bitwise_equal("lse", out_lse, expected_lse)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_fold_into_one_of_its_parts(part: int) -> None:
    o, lse = states(9, 3, 2, 33, torch.float32)
    expected, expected_lse = merge_states(o, lse)
    others = [p for p in range(3) if p != part]
    before = o[:, others].clone()
    merge_states(o, lse, out=o[:, part], lse=lse[:, part])
    assert_bitwise_equal("out", o[:, part], expected)
    assert_bitwise_equal("lse", lse[:, part], expected_lse)
    assert_bitwise_equal("other parts", o[:, others], before)


@pytest.mark.parametrize("in_place", [True, False])
def test_mask_merges_only_its_rows(in_place: bool) -> None:
    o, lse = states(6, 2, 3, 50, torch.bfloat16)
    a, lse_a, b, lse_b = o[:, 0].clone(), lse[:, 0].clone(), o[:, 1], lse[:, 1]
    a[1], lse_a[1] = math.nan, -INF  # an unmerged row is copied, whatever it holds
    mask = torch.tensor([True, False, False, True, True, False])
    merged, merged_lse = merge_state(a, lse_a, b, lse_b)
    expected = torch.where(mask[:, None, None], merged, a)
    expected_lse = torch.where(mask[:, None], merged_lse, lse_a)
    out, out_lse = (a, lse_a) if in_place else (torch.full_like(a, 7), torch.full_like(lse_a, 7))
    merge_state(a, lse_a, b, lse_b, out=out, lse=out_lse, mask=mask)
    assert_bitwise_equal("out", out, expected)
    assert_bitwise_equal("lse", out_lse, expected_lse)


def test_strided_inputs_and_outputs() -> None:
    wide, wide_lse = torch.randn(5, 4, 2, 96), torch.randn(4, 2, 5)
    o = wide.transpose(0, 1)[:, :, :, 16:80]  # [4, 5 parts, 2, 64]
    lse = wide_lse.permute(0, 2, 1)
    target = torch.full((2, 4, 70), 9.0)
    target_lse = torch.full((2, 4), 9.0)
    expected, expected_lse = merge_states(o.contiguous(), lse.contiguous())
    merge_states(o, lse, out=target.transpose(0, 1)[:, :, 3:67], lse=target_lse.T)
    assert_bitwise_equal("out", target.transpose(0, 1)[:, :, 3:67], expected)
    assert_bitwise_equal("lse", target_lse.T, expected_lse)
    assert (target[:, :, :3] == 9).all()
    assert (target[:, :, 67:] == 9).all(), "written beyond head_dim"


A, LSE = torch.zeros(3, 2, 16), torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: merge_state(A.long(), LSE, A, LSE), TypeError, ["o_a", "float32", "int64"]),
        (lambda: merge_state(A, LSE.double(), A, LSE), TypeError, ["lse_a", "float32", "float64"]),
        (lambda: merge_state(A, LSE, A.half(), LSE), TypeError, ["o_b", "float32", "float16"]),
        (lambda: merge_state(A, LSE, A[:2], LSE), ValueError, ["o_b", "[3, 2, 16]", "[2, 2, 16]"]),
        (lambda: merge_state(A, LSE, A, LSE[:, :1]), ValueError, ["lse_b", "[3, 2]", "[3, 1]"]),
        (lambda: merge_state(A, LSE, A, LSE, out=A[:, :1]), ValueError, ["out", "[3, 2, 16]", "[3, 1, 16]"]),
        (lambda: merge_state(A, LSE, A, LSE, out=A.half()), TypeError, ["out", "float32", "float16"]),
        (lambda: merge_state(A, LSE, A, LSE, lse=LSE.half()), TypeError, ["lse", "float32", "float16"]),
        (lambda: merge_state(A, LSE, A, LSE, mask=torch.ones(3)), TypeError, ["mask", "bool", "float32"]),
        (
            lambda: merge_state(A, LSE, A, LSE, mask=torch.ones(2, dtype=torch.bool)),
            ValueError,
            ["mask", "[3]", "[2]"],
        ),
        (lambda: merge_state(A[..., ::2], LSE, A, LSE), ValueError, ["o_a", "unit stride", "2"]),
        (lambda: merge_state(A[0], LSE, A, LSE), ValueError, ["o_a", "[2, 16]"]),
        (lambda: merge_state(None, LSE, A, LSE), TypeError, ["o_a", "tensor", "NoneType"]),
        (lambda: merge_states(A, LSE), ValueError, ["o", "[n, parts, heads, head_dim]", "(3, 2, 16)"]),
        (lambda: merge_states(A[:, None], LSE), ValueError, ["lse_parts", "[3, 1, 2]", "[3, 2]"]),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
    assert not A.any(), "written in spite of the error"
    assert not LSE.any(), "written in spite of the error"
