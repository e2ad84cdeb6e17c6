# SPDX-License-Identifier: Apache-2.0
"""The batch-invariant mode where warpgroups multiply tiles of 128 rows and warps all others (sm_90a).

That both add up the same products to the same bits is a property of the hardware, which no manual promises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_batch import SPLIT_COSTS
from gpu_device import device
from gpu_specs import spec
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from sequences import Sequence, compute, expected
from torch import Tensor

from fi_backend.core import kernels
from fi_backend.core.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

COMMON = ["invariant 64", "invariant 128", "invariant fp16 64", "invariant fp16 128"]
OTHERS = ["invariant 80", "invariant 96", "invariant 112", "invariant transform 64"]
GROUP = 4


def layer(module: str, **options: Any) -> AttentionSpec:
    """A layer of 4 query heads a KV head: 32 query tokens fill a tile of 128 rows."""
    found = spec(module, 2 * GROUP, 2, **options)
    try:
        kernels.attention_module(replace(found, batch_invariant=False), device(), None, "wgmma")
    except ValueError as error:
        pytest.skip(str(error))  # a target without wgmma; on others the mode must take it
    wgmma = kernels.attention_module(found, device(), None, "wgmma")
    assert wgmma == kernels.attention_module(found, device())
    assert wgmma.name != kernels.attention_module(found, device(), None, "mma").name
    return found


def results(spec: AttentionSpec, parts: list[Any], grid: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    costs = replace(SPLIT_COSTS, invariant_grid=grid)
    return compute(spec, parts, **({"device": device(), "num_ctas": 132, "costs": costs} | options))


def assert_same(name: str, actual: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for side, a, b in zip(("out", "lse"), actual, wanted, strict=True):
        assert_bitwise_equal(f"{side} of {name}", a, b)


@pytest.mark.parametrize("grid", [64, 192, 512])
@pytest.mark.parametrize("module", [*COMMON, *OTHERS])
def test_wgmma_gives_the_bits_of_mma(module: str, grid: int) -> None:
    """Few and many keys, borders inside of a tile's keys and at their ends, one state or one a chunk."""
    for options in ({}, {"window_left": 200, "sinks": True}):
        found = layer(module, **options)
        lens = ((32, 32), (64, 33), (65, 65), (513, 200), (577, 64), (1000, 32), (1340, 96))
        parts = [(Sequence.random(found, n, seed=n), n - q, n) for n, q in lens]
        for num_ctas in (1, 132):
            both = (results(found, parts, grid, num_ctas=num_ctas, kernel=name) for name in (None, "mma"))
            for part, a, b in zip(parts, *both, strict=True):
                assert_same(f"{part[1]}..{part[2]}, {num_ctas} CTAs, {options}", a, b)
                o, lse, amplitude = expected(found, part)
                assert_close("out", a[0], o, amplitude=amplitude)
                assert_lse_close("lse", a[1], lse)


@pytest.mark.parametrize("grid", [64, 192, 512])
@pytest.mark.parametrize("module", COMMON)
def test_a_token_has_its_bits_in_tiles_of_every_height(module: str, grid: int) -> None:
    """Tokens of one prompt in tiles of 16, 32, 64 and 128 rows, alone and beside other requests."""
    found = layer(module)
    length, tallest = 1340, 128 // GROUP
    sequence = Sequence.random(found, length, seed=1)
    whole = results(found, [(sequence, 0, length)], grid, num_ctas=1)[0]
    others = [(Sequence.random(found, n, seed=n), n - q, n) for n, q in ((150, 40), (700, 1), (5, 5))]
    for n, count in enumerate((1, 4, 5, 8, 9, 16, 17, tallest, tallest + 1, 3 * tallest, 700)):
        for end in (length, max(513 + count // 2, count), min(64 * (1 + n) + count, length)):
            begin, place = end - count, n % 4
            beside = [*others[:place], (sequence, begin, end), *others[place:]]
            for parts, at, num_ctas in (([(sequence, begin, end)], 0, 1 + n), (beside, place, 132)):
                again = results(found, parts, grid, num_ctas=num_ctas, page_seed=n)[at]
                assert_same(f"tokens {begin}..{end}", again, (whole[0][begin:end], whole[1][begin:end]))
