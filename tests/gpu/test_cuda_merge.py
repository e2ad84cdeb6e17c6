# SPDX-License-Identifier: Apache-2.0
"""⊕ on CUDA: against float64, and by the bits where nothing is rounded or where two ways must agree."""

from __future__ import annotations

import math
from functools import reduce

import examples
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal, assert_close, assert_lse_close
from torch import Tensor
from union import exact_union, states

from fi_backend.core.merge import merge_state, merge_states

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INF = math.inf
CUDA = "cuda"
CYCLES = 200_000_000  # about 0.1 s of torch.cuda._sleep


def states_on_cuda(*arguments: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    o, lse = states(*arguments, dtype, seed)
    return o.to(CUDA), lse.to(CUDA)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for name, got, wanted in zip(("out", "lse"), actual, expected, strict=True):
        assert_bitwise_equal(name, got.cpu(), wanted.cpu())


@given(
    n=st.integers(0, 9),
    parts=st.integers(1, 11),
    heads=st.integers(1, 5),
    dim=st.integers(1, 40) | st.sampled_from([64, 72, 80, 128, 192, 256, 512, 2056]),
    dtype=st.sampled_from(DTYPES),
    empty=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
@examples.share(200)
def test_random_unions(
    n: int, parts: int, heads: int, dim: int, dtype: torch.dtype, empty: float, seed: int
) -> None:
    o, lse = states(n, parts, heads, dim, dtype, seed)
    lse = torch.where(torch.rand(lse.shape, generator=torch.Generator().manual_seed(seed)) < empty, -INF, lse)
    expected, expected_lse, amplitude = exact_union(o, lse)
    o, lse = o.to(CUDA), lse.to(CUDA)
    out, out_lse = merge_states(o, lse)
    assert_close("out", out.cpu(), expected, amplitude=amplitude)
    assert_lse_close("lse", out_lse.cpu(), expected_lse)
    assert_same(merge_states(o, lse), (out, out_lse))
    # float32 keeps the state between steps, so there the fold and its single steps agree bit for bit.
    if dtype is torch.float32:
        nothing = torch.zeros_like(o[:, 0]), torch.full_like(lse[:, 0], -INF)
        steps = zip(o.unbind(1), lse.unbind(1), strict=True)
        assert_same(reduce(lambda a, b: merge_state(*a, *b), steps, nothing), (out, out_lse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", [1.5, -0.0, INF, math.nan])
@pytest.mark.parametrize("dim", [37, 128])
def test_empty_side_leaves_the_bits_of_the_other(dtype: torch.dtype, content: float, dim: int) -> None:
    o, lse = states_on_cuda(3, 1, 2, dim, dtype=dtype)
    full, full_lse = o[:, 0].clone(), lse[:, 0].clone()
    full[0, 0, :4] = torch.tensor([-0.0, INF, 1e-7, math.nan]).to(dtype)
    empty, empty_lse = torch.full_like(full, content), torch.full_like(full_lse, -INF)
    assert_same(merge_state(full, full_lse, empty, empty_lse), (full, full_lse))
    assert_same(merge_state(empty, empty_lse, full, full_lse), (full, full_lse))
    assert_same(merge_state(empty, empty_lse, empty, empty_lse), (torch.zeros_like(full), empty_lse))


def test_no_part_at_all_is_the_empty_set() -> None:
    out, lse = merge_states(torch.empty(4, 0, 3, 20, device=CUDA), torch.empty(4, 0, 3, device=CUDA))
    assert_same((out, lse), (torch.zeros(4, 3, 20), torch.full((4, 3), -INF)))


@pytest.mark.parametrize("top", [-1e30, -5e4, 5e4, 1e30])
def test_large_logarithms_neither_overflow_nor_vanish(top: float) -> None:
    o, lse = states(8, 2, 2, 64, torch.float32)
    lse = lse + torch.tensor(top)
    out, out_lse = merge_states(o.to(CUDA), lse.to(CUDA))
    expected, expected_lse, amplitude = exact_union(o, lse)
    assert_close("out", out.cpu(), expected, amplitude=amplitude)
    assert_lse_close("lse", out_lse.cpu(), expected_lse)


def test_nan_of_a_visible_set_propagates() -> None:
    o, lse = states_on_cuda(2, 2, 1, 16, dtype=torch.bfloat16)
    clean = merge_states(o, lse)[0]
    o[0, 1, 0, 3] = math.nan
    out = merge_states(o, lse)[0]
    assert out.isnan().nonzero().tolist() == [[0, 0, 3]]
    assert_bitwise_equal("other elements", out[1].cpu(), clean[1].cpu())


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [33, 128, 512])
def test_fold_into_one_of_its_parts(part: int, dtype: torch.dtype, dim: int) -> None:
    o, lse = states_on_cuda(700, 3, 2, dim, dtype=dtype)
    expected = merge_states(o, lse)
    others = [p for p in range(3) if p != part]
    before = o[:, others].clone(), lse[:, others].clone()
    merge_states(o, lse, out=o[:, part], lse=lse[:, part])
    assert_same((o[:, part], lse[:, part]), expected)
    assert_same((o[:, others], lse[:, others]), before)


@pytest.mark.parametrize("in_place", [None, "a", "b"])
def test_mask_merges_only_its_rows(in_place: str | None) -> None:
    o, lse = states_on_cuda(6, 2, 3, 56, dtype=torch.bfloat16)
    a, lse_a, b, lse_b = o[:, 0].clone(), lse[:, 0].clone(), o[:, 1].clone(), lse[:, 1].clone()
    a[1], lse_a[1] = math.nan, -INF  # an unmerged row is copied, whatever it holds
    mask = torch.tensor([True, False, False, True, True, False], device=CUDA)
    merged, merged_lse = merge_state(a, lse_a, b, lse_b)
    expected = torch.where(mask[:, None, None], merged, a), torch.where(mask[:, None], merged_lse, lse_a)
    results = {"a": (a, lse_a), "b": (b, lse_b), None: (torch.full_like(a, 7), torch.full_like(lse_a, 7))}
    out, out_lse = results[in_place]
    merge_state(a, lse_a, b, lse_b, out=out, lse=out_lse, mask=mask)
    assert_same((out, out_lse), expected)


@pytest.mark.parametrize("start", [16, 3])
def test_strided_inputs_and_outputs(start: int) -> None:
    """From column 16 on rows keep their alignment, from column 3 on they do not."""
    random = torch.Generator().manual_seed(0)
    wide = torch.randn(5, 4, 2, 96, generator=random).bfloat16().to(CUDA)
    wide_lse = torch.randn(4, 2, 5, generator=random).to(CUDA)
    o, lse = wide.transpose(0, 1)[:, :, :, start : start + 64], wide_lse.permute(0, 2, 1)
    target = torch.full((2, 4, 96), 9.0, dtype=torch.bfloat16, device=CUDA)
    target_lse = torch.full((2, 4), 9.0, device=CUDA)
    expected = merge_states(o.contiguous(), lse.contiguous())
    out = target.transpose(0, 1)[:, :, start : start + 64]
    merge_states(o, lse, out=out, lse=target_lse.T)
    assert_same((out, target_lse.T), expected)
    assert (target[:, :, :start] == 9).all(), "written before head_dim"
    assert (target[:, :, start + 64 :] == 9).all(), "written beyond head_dim"


def test_a_captured_union_reads_new_states() -> None:
    o, lse = states_on_cuda(9, 3, 2, 64, dtype=torch.bfloat16)
    out, out_lse = merge_states(o, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_states(o, lse, out=out, lse=out_lse)
    for seed in (1, 2):
        new = states_on_cuda(9, 3, 2, 64, dtype=torch.bfloat16, seed=seed)
        o.copy_(new[0])
        lse.copy_(new[1])
        graph.replay()
        assert_same((out, out_lse), merge_states(*new))


def test_the_call_neither_waits_nor_allocates_and_uses_the_current_stream() -> None:
    """Behind a sleeping kernel: a union on another stream would read the old states."""
    o, lse = states_on_cuda(9, 2, 2, 64, dtype=torch.float16)
    new, new_lse = states_on_cuda(9, 2, 2, 64, dtype=torch.float16, seed=1)
    out, out_lse = merge_states(o, lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            o.copy_(new)
            lse.copy_(new_lse)
            merge_states(o, lse, out=out, lse=out_lse)
            waited = stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the call waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    stream.synchronize()
    assert_same((out, out_lse), merge_states(new, new_lse))


@pytest.mark.parametrize("name", ["o_a", "lse_a", "o_b", "lse_b", "mask", "out", "lse"])
def test_a_tensor_of_another_device_is_named(name: str) -> None:
    a, lse = torch.zeros(3, 2, 16), torch.zeros(3, 2)
    arguments = {"o_a": a, "lse_a": lse, "o_b": a, "lse_b": lse, "out": a, "lse": lse}
    arguments["mask"] = torch.ones(3, dtype=torch.bool)
    arguments = {key: x.to("cpu" if key == name else CUDA) for key, x in arguments.items()}
    with pytest.raises(ValueError, match="host memory") as raised:
        merge_state(**arguments)
    # The first argument tells the device; when it is the odd one, the next one is found not to be there.
    assert str(raised.value).startswith("lse_a" if name == "o_a" else name)
