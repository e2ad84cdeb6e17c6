# SPDX-License-Identifier: Apache-2.0
"""append_kv: which bytes of a cache change, and what they hold, for every pair of dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable

import examples
import pytest
import torch
from append_caches import LAYOUTS, caches
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal
from torch import Tensor
from virtual import virtual_zeros

from fi_backend.core.append import append_kv

SOURCES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHES = SOURCES + FP8


def all_codes(dtype: torch.dtype) -> Tensor:
    """Every finite non-negative number of an fp8 format, ascending, as float64."""
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    return values[torch.isfinite(values)]


def nearest_even(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 numbers to an fp8 format by search in the list of its numbers, saturating."""
    codes = all_codes(dtype)
    magnitude = x.abs().clamp(max=float(codes[-1]))
    above = torch.searchsorted(codes, magnitude).clamp(max=len(codes) - 1)
    below = (above - 1).clamp(min=0)
    up, down = codes[above] - magnitude, magnitude - codes[below]
    pick = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.copysign(codes[pick], x)


def expected_rows(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """What the cache should hold, as float64: float32 division, then one rounding to `dtype`."""
    quotient = x.float() / scale
    return nearest_even(quotient.double(), dtype) if dtype in FP8 else quotient.to(dtype).double()


def append_one(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Append the vector x as one key and return what the cache holds, as float64."""
    cache, values = torch.zeros(1, 1, 1, x.numel()).to(dtype), torch.zeros(1, 1, 1, 1)
    append_kv(x.view(1, 1, -1), x[:1].view(1, 1, 1), cache, values, torch.tensor([0]), k_scale=scale)
    return cache.view(-1).double()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", SOURCES)
def test_fp8_rounds_every_number_to_the_nearest(dtype: torch.dtype, source: torch.dtype) -> None:
    """The codes, the midpoints of neighbours (ties), and what lies right beside them; both signs."""
    codes = all_codes(dtype)
    middle = (codes[1:] + codes[:-1]) / 2
    around = torch.cat([codes, middle]).float()
    x = torch.cat([around, around.nextafter(torch.tensor(INF)), around.nextafter(torch.tensor(-INF))])
    x = torch.cat([x, -x]).to(source)
    assert_bitwise_equal("cache", append_one(x, dtype), nearest_even(x.double(), dtype))


INF = math.inf


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([INF, -INF, 1e38, -1e38, largest * 1.01, largest, 1e-40, -0.0, -1e-40])
    top = [largest, -largest] * 2 + [largest] * 2
    assert_bitwise_equal("cache", append_one(x, dtype), torch.tensor([*top, 0.0, -0.0, -0.0]).double())
    assert torch.isnan(append_one(torch.tensor([math.nan, -math.nan]), dtype)).all()


@pytest.mark.parametrize("dtype", SOURCES)
@pytest.mark.parametrize("source", SOURCES)
def test_float_caches_hold_special_values(source: torch.dtype, dtype: torch.dtype) -> None:
    x = torch.tensor(
        [0.0, -0.0, INF, -INF, 1e38, -1e38, 65504, 65519.9, 65520, 1e-8, -3e-8, 1.0, 1 + 2**-9]
    ).to(source)
    assert_bitwise_equal("cache", append_one(x, dtype), x.float().to(dtype).double())
    assert torch.isnan(append_one(torch.tensor([math.nan]).to(source), dtype)).all()


@given(
    tokens=st.integers(0, 9),
    padding=st.integers(0, 3),
    heads=st.integers(1, 4),
    dims=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    page_size=st.integers(1, 17),
    pages=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    source=st.sampled_from(SOURCES),
    dtype=st.sampled_from(CACHES),
    scales=st.sampled_from(["one", "number", "per head"]),
    seed=st.integers(0, 2**16),
)
@examples.share(150)
def test_only_the_slots_change(
    tokens: int,
    padding: int,
    heads: int,
    dims: tuple[int, int],
    page_size: int,
    pages: int,
    layout: str,
    source: torch.dtype,
    dtype: torch.dtype,
    scales: str,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = min(tokens, pages * page_size)
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.2] = -1
    dim, dim_v = dims
    k_cache, v_cache = caches(layout, pages, page_size, heads, dims, (dtype, dtype))
    key = torch.randn(tokens + padding, heads, dim, generator=generator).to(source)
    value = torch.randn(tokens + padding, heads, dim_v, generator=generator).to(source)
    k_scale, v_scale = {
        "one": (1.0, 1.0),
        "number": (0.25, 3.0),
        "per head": (torch.rand(heads, generator=generator) + 0.5, torch.tensor([2.0])),
    }[scales]
    wanted = []
    for x, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
        flat = cache.double().reshape(pages * page_size, heads, -1).clone()
        factor = scale.view(-1, 1) if isinstance(scale, Tensor) else scale
        rows = expected_rows(x[:tokens], factor, dtype)
        flat[slots[slots >= 0]] = rows[slots >= 0]
        wanted.append(flat)
    append_kv(key, value, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
    for name, cache, expected in zip(("k_cache", "v_cache"), (k_cache, v_cache), wanted, strict=True):
        assert_bitwise_equal(name, cache.double().reshape(expected.shape), expected)


def test_many_tokens_on_many_threads() -> None:
    key, value = torch.randn(2000, 8, 64), torch.randn(2000, 8, 64)
    k_cache, v_cache = (torch.zeros(130, 16, 8, 64, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(130 * 16)[:2000]
    append_kv(key, value, k_cache, v_cache, slots)
    assert_bitwise_equal("k_cache", k_cache.view(-1, 8, 64)[slots], key.bfloat16())
    assert_bitwise_equal("v_cache", v_cache.view(-1, 8, 64)[slots], value.bfloat16())


def test_slots_beyond_32_bits() -> None:
    """A cache whose last page starts past element 2^32, by its strides alone."""
    stride = 3 * 2**30
    storage = virtual_zeros(2 * stride + 64, torch.bfloat16)
    cache = storage.as_strided((3, 4, 1, 16), (stride, 16, 16, 1))
    cache[2] = 0
    key = torch.randn(1, 1, 16)
    append_kv(key, key, cache, cache, torch.tensor([2 * 4 + 3]))
    assert_bitwise_equal("cache", cache[2, 3], key[0].bfloat16())
    assert not cache[2, :3].any()


X, CACHE, SLOTS = torch.ones(3, 2, 16), torch.zeros(4, 8, 2, 16), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: append_kv(X, X, CACHE, CACHE, torch.tensor([0, 32])),
            ValueError,
            ["slot_mapping[1]", "0..31", "32"],
        ),
        (
            lambda: append_kv(X, X, CACHE, CACHE, torch.tensor([-2])),
            ValueError,
            ["slot_mapping[0]", "-1 (skip)", "-2"],
        ),
        (lambda: append_kv(X, X, CACHE, CACHE, SLOTS.int()), TypeError, ["slot_mapping", "int64", "int32"]),
        (lambda: append_kv(X, X, CACHE, CACHE, torch.arange(4)), ValueError, ["slot_mapping", "4", "3"]),
        (lambda: append_kv(X.double(), X, CACHE, CACHE, SLOTS), TypeError, ["key", "float32", "float64"]),
        (
            lambda: append_kv(X, X, CACHE.byte(), CACHE, SLOTS),
            TypeError,
            ["k_cache", "uint8", "float8_e4m3fn"],
        ),
        (
            lambda: append_kv(X, X, CACHE[..., :8], CACHE, SLOTS),
            ValueError,
            ["k_cache", "2, 16]", "[4, 8, 2, 8]"],
        ),
        (
            lambda: append_kv(X, X, CACHE, CACHE[:3], SLOTS),
            ValueError,
            ["v_cache", "[4, 8, 2, 16]", "[3, 8, 2, 16]"],
        ),
        (
            lambda: append_kv(X, X, CACHE[:, :0], CACHE[:, :0], torch.tensor([-1])),
            ValueError,
            ["k_cache", "page_size", "[4, 0, 2, 16]"],
        ),
        (lambda: append_kv(X, X[:, :1], CACHE, CACHE, SLOTS), ValueError, ["value", "2", "[3, 1, 16]"]),
        (
            lambda: append_kv(X[..., ::2], X, CACHE[..., ::2], CACHE, SLOTS),
            ValueError,
            ["key", "unit stride", "2"],
        ),
        (
            lambda: append_kv(X, X, CACHE, CACHE, SLOTS, k_scale=torch.ones(3)),
            ValueError,
            ["k_scale", "[1]", "[3]"],
        ),
        (lambda: append_kv(X, X, CACHE, CACHE, [0, 1, 2]), TypeError, ["slot_mapping", "tensor", "list"]),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
    assert not CACHE.any(), "written in spite of the error"
