# SPDX-License-Identifier: Apache-2.0
"""append_kv on CUDA: every byte of the caches' allocations equals what the CPU operator leaves there."""

from __future__ import annotations

import examples
import pytest
import torch
from append_caches import LAYOUTS, caches, full, storage_bytes
from append_pairs import CUDA, any_bits, assert_as_on_host, on_cuda, on_host
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.gpu

SOURCES = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHES = SOURCES + FP8
INT64 = torch.iinfo(torch.int64)


@given(
    tokens=st.integers(0, 40),
    padding=st.integers(0, 3),
    heads=st.integers(1, 5),
    dims=st.tuples(*[st.sampled_from([1, 7, 20, 64, 72, 80, 96, 128, 192, 256])] * 2),
    page_size=st.integers(1, 17) | st.sampled_from([64, 528]),
    pages=st.integers(1, 6),
    layout=st.sampled_from(LAYOUTS),
    sources=st.tuples(st.sampled_from(SOURCES), st.sampled_from(SOURCES)),
    dtypes=st.tuples(st.sampled_from(CACHES), st.sampled_from(CACHES)),
    alike=st.booleans(),
    scales=st.sampled_from(["one", "power of two", "number", "extreme", "per head"]),
    seed=st.integers(0, 2**16),
)
@examples.share(300)
def test_all_bytes_equal_those_of_the_cpu(
    tokens: int,
    padding: int,
    heads: int,
    dims: tuple[int, int],
    page_size: int,
    pages: int,
    layout: str,
    sources: tuple[torch.dtype, torch.dtype],
    dtypes: tuple[torch.dtype, torch.dtype],
    alike: bool,
    scales: str,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    if alike:
        sources = (sources[0], sources[0])
    if alike or layout in ("packed", "heads first"):
        dtypes = (dtypes[0], dtypes[0])
    tokens = min(tokens, pages * page_size)
    slots = torch.randperm(pages * page_size, generator=random)[:tokens]
    slots[torch.rand(tokens, generator=random) < 0.2] = -1
    key, value = (
        any_bits((tokens + padding, heads, dim), source, seed)
        for dim, source in zip(dims, sources, strict=True)
    )
    k_scale, v_scale = {
        "one": (1.0, 1.0),
        "power of two": (0.25, 2.0**-126),
        "number": (0.37, 3.0),
        "extreme": (1e-37, 3e38),
        "per head": (torch.rand(heads, generator=random) + 0.5, torch.tensor([2.0])),
    }[scales]
    assert_as_on_host(
        key,
        value,
        slots,
        lambda device: caches(layout, pages, page_size, heads, dims, dtypes, device),
        k_scale=k_scale,
        v_scale=v_scale,
    )


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.5, 0.7, 448.0])
def test_every_number_of_16_bits(source: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source).view(64, 8, 128)
    assert_as_on_host(
        x,
        x,
        torch.arange(64),
        lambda device: caches("separate", 4, 16, 8, (128, 128), (dtype, dtype), device),
        k_scale=scale,
        v_scale=torch.full((8,), scale),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8])
def test_quotients_of_random_floats_are_rounded_once(dtype: torch.dtype) -> None:
    """A million quotients by scales without a short reciprocal."""
    random = torch.Generator().manual_seed(0)
    x = any_bits((1024, 8, 128), torch.float32, 1)
    k_scale = torch.rand(8, generator=random) * 10 + 1e-3
    v_scale = torch.exp2(torch.rand(8, generator=random) * 200 - 100)
    assert_as_on_host(
        x,
        x.flip(0),
        torch.arange(1024),
        lambda device: caches("separate", 64, 16, 8, (128, 128), (dtype, dtype), device),
        k_scale=k_scale,
        v_scale=v_scale,
    )


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (2, 1), (255, 96), (3000, 1), (9000, 8)])
@pytest.mark.parametrize("layout", ["heads first", "unaligned"])
def test_few_and_many_tokens(tokens: int, heads: int, layout: str) -> None:
    key, value = (any_bits((tokens, heads, dim), torch.bfloat16, dim) for dim in (64, 48))
    pages = tokens // 16 + 2
    slots = torch.randperm(pages * 16, generator=torch.Generator().manual_seed(tokens))[:tokens]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert_as_on_host(
            key,
            value,
            slots,
            lambda device, dtype=dtype: caches(layout, pages, 16, heads, (64, 48), (dtype, dtype), device),
            k_scale=0.3,
        )


def test_slices_of_one_projection_are_read_through_their_strides() -> None:
    """Keys and values as a model has them: parts of one [tokens, (q + 2 kv) * head_dim] tensor."""
    rows = torch.randn(33, 6 * 80).bfloat16()

    def parts(rows: Tensor) -> tuple[Tensor, Tensor]:
        _, key, value = rows.split([320, 80, 80], dim=1)
        return key.view(33, 1, 80), value.view(33, 1, 80)

    slots = torch.arange(33).flip(0)
    expected, actual = (caches("packed", 5, 8, 1, (80, 80), (torch.bfloat16,) * 2, d) for d in ("cpu", CUDA))
    on_host(*parts(rows), *expected, slots)
    on_cuda(*parts(rows.to(CUDA)), *actual, slots.to(CUDA))
    assert torch.equal(storage_bytes(actual[0]), storage_bytes(expected[0]))


@pytest.mark.parametrize("dim", [64, 20])
def test_slots_outside_the_cache_are_skipped(dim: int) -> None:
    slots = torch.tensor([3, -1, 32, -2, 31, 2**31 + 3, 2**32, INT64.max, INT64.min, 0])
    x = torch.randn(len(slots), 2, dim)

    def middle(device: str) -> tuple[Tensor, Tensor]:
        wide = [full((12, 8, 2, dim), torch.float16, device)[4:8] for _ in "kv"]
        return wide[0], wide[1]

    assert_as_on_host(x, x, slots, middle)
