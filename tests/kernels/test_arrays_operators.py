# SPDX-License-Identifier: Apache-2.0
"""Merges and appends on arrays of other libraries: the bits of torch's path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from array_cases import LIBRARIES, converter, to_numpy, to_tensor
from numeric import assert_bitwise_equal

from fi_backend import arrays

pytest.importorskip("ml_dtypes")


@pytest.mark.parametrize("library", LIBRARIES)
def test_merges(library: str) -> None:
    from fi_backend import merge_state, merge_states

    convert = converter(library)
    o = torch.randn(7, 3, 4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    sums = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(1))
    sums[2, 1] = -torch.inf
    parts = [(o[:, i].contiguous(), sums[:, i].contiguous()) for i in range(2)]
    mask = torch.arange(7) % 3 != 0
    for result, expected in (
        (arrays.merge_states(convert(o), convert(sums)), merge_states(o, sums)),
        (
            arrays.merge_state(*(convert(t) for part in parts for t in part), mask=convert(mask)),
            merge_state(*parts[0], *parts[1], mask=mask),
        ),
    ):
        for got, wanted in zip(result, expected, strict=True):
            assert type(got) is type(convert(wanted))
            assert_bitwise_equal("state", to_tensor(got), wanted)
    into = torch.empty(7, 4, 64, dtype=torch.bfloat16)
    if library != "jax":
        given = convert(into)
        assert arrays.merge_states(convert(o), convert(sums), out=given)[0] is given
        assert_bitwise_equal("out", into, merge_states(o, sums)[0])
    with pytest.raises(ValueError, match=r"^lse_parts: expected shape \[7, 3, 4\]; got \[7, 4\]"):
        arrays.merge_states(convert(o), convert(sums[:, 0].contiguous()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("slots", [np.int32, np.int64])
def test_append(dtype: torch.dtype, slots: Any) -> None:
    from fi_backend import append_kv

    random = torch.Generator().manual_seed(3)
    key, value = (torch.randn(4, 2, 64, generator=random) for _ in "kv")
    caches = [torch.zeros(3, 8, 2, 64).to(dtype) for _ in range(4)]
    where = np.array([5, -1, 23, 0], slots)
    append_kv(key, value, *caches[:2], torch.from_numpy(where.astype(np.int64)), k_scale=0.5)
    ours = [to_numpy(cache) for cache in caches[2:]]
    arrays.append_kv(key.numpy(), value.numpy(), *ours, where, k_scale=0.5)
    for expected, got in zip(caches[:2], caches[2:], strict=True):
        assert_bitwise_equal("cache", got, expected)
    assert caches[2].float().abs().sum() > 0
    with pytest.raises(ValueError, match=r"^slot_mapping\[1\]: expected -1 \(skip\) or a slot in 0\.\.23"):
        arrays.append_kv(key.numpy(), value.numpy(), *ours, np.array([0, 24], slots))
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(ValueError, match=r"^k_cache: expected an array that can be written; got one of JAX"):
        arrays.append_kv(key.numpy(), value.numpy(), jnp.zeros((3, 8, 2, 64)), ours[1], where)
