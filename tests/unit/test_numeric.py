# SPDX-License-Identifier: Apache-2.0
"""The comparison itself: its table is what the dtypes give, and wrong results do not pass."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import (
    TOLERANCES,
    assert_bitwise_equal,
    assert_close,
    assert_lse_close,
    baseline,
    scale_free_diff,
)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_tolerances_are_a_small_multiple_of_what_the_dtype_does(dtype: torch.dtype) -> None:
    measured = [
        baseline(dtype, rows=16, keys=keys, dim=dim, seed=0)
        for keys in (1, 7, 64, 512, 2000)
        for dim in (16, 64, 128, 512)
    ]
    diff, inner = (max(values) for values in zip(*measured, strict=True))
    allowed = TOLERANCES[dtype]
    assert diff < allowed.diff < 8 * diff
    assert inner < allowed.inner + allowed.rounding < 8 * inner


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_rounding_passes_and_zeros_or_one_wrong_element_fail(dtype: torch.dtype) -> None:
    exact = torch.randn(5, 3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rounded = exact.to(dtype)
    assert_close("o", rounded, exact)
    with pytest.raises(AssertionError, match=r"^o\[0, 0, 0\]: expected"):
        assert_close("o", torch.zeros_like(rounded), exact)
    wrong = rounded.clone()
    wrong[3, 1, 5] *= 1.1
    with pytest.raises(
        AssertionError, match=r"^o\[3, 1, 5\]: expected .*; got .*; error .* 1 of 960 elements$"
    ):
        assert_close("o", wrong, exact)


def test_a_small_error_everywhere_is_caught_by_the_scale_free_difference() -> None:
    exact = torch.ones(4, 64, dtype=torch.float64)
    with pytest.raises(AssertionError, match="scale-free difference"):
        assert_close("o", (exact * (1 + 3e-6)).float(), exact)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_special_values_must_stand_at_the_same_places(value: float) -> None:
    exact = torch.ones(2, 3, dtype=torch.float64)
    broken = exact.float()
    broken[1, 2] = value
    with pytest.raises(AssertionError, match=r"o\[1, 2\]: .* in one of the two only: expected 1.0; got"):
        assert_close("o", broken, exact)
    with pytest.raises(AssertionError, match=r"lse\[1, 2\]"):
        assert_lse_close("lse", broken, exact)
    assert_close("o", broken, broken.double())


def test_shapes_are_compared() -> None:
    with pytest.raises(AssertionError, match=r"o: expected shape \(2, 3\); got \(3, 2\)"):
        assert_close("o", torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64))


def test_lse_of_another_base_fails() -> None:
    lse = torch.full((2, 2), 5.0, dtype=torch.float64)
    assert_lse_close("lse", lse.float(), lse)
    with pytest.raises(AssertionError, match=r"lse\[0, 0\]"):
        assert_lse_close("lse", (lse / math.log(2)).float(), lse)


def test_bitwise_tells_signed_zeros_apart_and_takes_equal_nans() -> None:
    values = torch.tensor([0.0, math.nan, 1.0])
    assert_bitwise_equal("o", values, values.clone())
    with pytest.raises(AssertionError, match=r"o\[0\]: expected the bits of 0.0; got -0.0; 1 of 3"):
        assert_bitwise_equal("o", torch.tensor([-0.0, math.nan, 1.0]), values)
    with pytest.raises(AssertionError, match=r"expected torch\.float32"):
        assert_bitwise_equal("o", values.half(), values)


def test_scale_free_difference_has_its_two_ends() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(2))
    assert scale_free_diff(x, x) == 0.0
    assert scale_free_diff(x, torch.zeros(100)) == 1.0
    assert scale_free_diff(1e-20 * x, 1.1e-20 * x) == pytest.approx(0.1**2 / (1 + 1.1**2))
