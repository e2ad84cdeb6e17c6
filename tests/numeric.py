# SPDX-License-Identifier: Apache-2.0
"""Comparison of numbers: special values first, then the size of the differences, with coordinates.

Tolerances follow from what a dtype does to the same computation, not from what a kernel happens to reach.
The baseline is the oracle evaluated once in float64 and once with the inner products, the probabilities and
the output rounded to the dtype (`baseline` below; unit/test_numeric.py measures it again):

| dtype    | diff, measured | inner error / amplitude, measured | Tolerance(diff, inner, rounding) |
|----------|----------------|-----------------------------------|----------------------------------|
| float32  | 6.9e-13        | 9.4e-7                            | 1e-12, 4e-6, 2^-23               |
| float16  | 4.6e-8         | 6.6e-4                            | 2.4e-7, 2^-10, 2^-10             |
| bfloat16 | 3.2e-6         | 5.3e-3                            | 1.5e-5, 2^-7, 2^-7               |

Products are summed one after another, so that the table does not depend on the processor.

`diff` is 1 - 2xy / (x^2 + y^2), which no scale of the tensors can hide. The bound of one element is
inner * amplitude + rounding * |expected|; the amplitude is sum(p * |v|), since cancellation in sum(p * v)
loses digits of the terms, not of the sum.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """Bounds of the scale-free difference, and of one element relative to its amplitude and its value."""

    diff: float
    inner: float
    rounding: float


TOLERANCES = {
    torch.float32: Tolerance(1e-12, 4e-6, 2.0**-23),
    torch.float16: Tolerance(2.4e-7, 2.0**-10, 2.0**-10),
    torch.bfloat16: Tolerance(1.5e-5, 2.0**-7, 2.0**-7),
}
# Logits are float32 everywhere, so that the error of a log-sum-exp does not depend on the dtype.
LSE_ABSOLUTE, LSE_RELATIVE = 2e-5, 2e-6


def scale_free_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2xy / (x^2 + y^2) over all elements: 0 for equal tensors, 1 when one of them is zero."""
    x, y = x.double().flatten(), y.double().flatten()
    total = float((x * x + y * y).sum())
    # (x - y)^2 instead of the textbook form, which cancels to noise below 1e-16.
    return float(((x - y) ** 2).sum()) / total if total else 0.0


def _coordinates(flags: Tensor) -> tuple[int, ...]:
    return tuple(flags.nonzero()[0].tolist())


def _expect_same_special(name: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {tuple(expected.shape)}; got {tuple(actual.shape)}")
    for kind, test in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differs = test(actual) != test(expected)
        if differs.any():
            at = _coordinates(differs)
            raise AssertionError(
                f"{name}{list(at)}: {kind} in one of the two only: expected {float(expected[at])!r}; got "
                f"{float(actual[at])!r}; {int(differs.sum())} of {differs.numel()} elements"
            )


def _expect_bounded(name: str, actual: Tensor, expected: Tensor, bound: Tensor) -> None:
    finite = torch.isfinite(expected)
    error = torch.where(finite, (actual.double() - expected).abs(), 0.0)
    wrong = error > bound
    if wrong.any():
        at = _coordinates(wrong)
        raise AssertionError(
            f"{name}{list(at)}: expected {float(expected[at])!r}; got {float(actual[at])!r}; error "
            f"{float(error[at]):.3g} > {float(bound[at]):.3g}; {int(wrong.sum())} of {wrong.numel()} elements"
        )


def assert_close(
    name: str, actual: Tensor, expected: Tensor, *, amplitude: Tensor | None = None, slack: float = 1.0
) -> None:
    """Compare a result with the float64 `expected` under the tolerance of the result's dtype.

    amplitude: size of the terms that were summed, same shape (default: |expected|). slack: multiplies the
    tolerance where the inputs themselves magnify rounding, such as logits of 1e5.
    """
    tolerance = TOLERANCES[actual.dtype]
    _expect_same_special(name, actual, expected)
    size = expected.abs() if amplitude is None else amplitude
    bound = (
        tolerance.inner * size
        + tolerance.rounding * expected.abs()
        + torch.finfo(actual.dtype).smallest_normal
    )
    _expect_bounded(name, actual, expected, slack * bound)
    # Rows of one amplitude, so that a wrong small row is not lost beside large ones. Where float16 has no
    # normal numbers any more, its digits are gone.
    inverse = torch.where(size > torch.finfo(actual.dtype).smallest_normal, 1 / size, 0.0)
    diff = scale_free_diff(actual.double() * inverse, expected * inverse)
    allowed = slack**2 * tolerance.diff  # it is quadratic in the errors
    if actual.shape[-1] >= 16 and diff > allowed:
        raise AssertionError(f"{name}: scale-free difference {diff:.3g} > {allowed:.3g}")


def assert_lse_close(name: str, actual: Tensor, expected: Tensor, *, slack: float = 1.0) -> None:
    """Compare float32 log-sum-exps with float64 ones; -inf must stand at the same places."""
    assert actual.dtype is torch.float32, f"{name}: expected float32; got {actual.dtype}"
    _expect_same_special(name, actual, expected)
    finite = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
    _expect_bounded(name, actual, expected, slack * (LSE_ABSOLUTE + LSE_RELATIVE * finite))


def assert_bitwise_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare bits (NaN payloads and signed zeros too) and report the first element that differs."""
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: expected {expected.dtype} {tuple(expected.shape)}; "
            f"got {actual.dtype} {tuple(actual.shape)}"
        )
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    differs = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if differs.any():
        at = _coordinates(differs)
        raise AssertionError(
            f"{name}{list(at)}: expected the bits of {float(expected[at])!r}; got {float(actual[at])!r}; "
            f"{int(differs.sum())} of {differs.numel()} elements differ"
        )


def _summed_in_turn(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, one product after another: a library sums as suits the processor."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for column, row in zip(a.float().T, b.float(), strict=True):
        total += column[:, None] * row
    return total


def baseline(dtype: torch.dtype, *, rows: int, keys: int, dim: int, seed: int) -> tuple[float, float]:
    """Measure what the dtype alone does: (scale-free difference, largest error over amplitude)."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, dim, generator=generator).to(dtype) for n in (rows, keys, keys))
    scale = 1 / math.sqrt(dim)
    exact_p = torch.softmax(q.double() @ k.double().T * scale, dim=1)
    exact, amplitude = exact_p @ v.double(), exact_p @ v.double().abs()
    rounded_p = torch.softmax(_summed_in_turn(q, k.T) * scale, dim=1).to(dtype)
    rounded = _summed_in_turn(rounded_p, v).to(dtype).double()
    return scale_free_diff(rounded / amplitude, exact / amplitude), float(
        ((rounded - exact).abs() / amplitude).max()
    )
