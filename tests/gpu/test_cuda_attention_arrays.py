# SPDX-License-Identifier: Apache-2.0
"""fi_backend.arrays on a GPU: the values of the oracle, the bits of torch's path, streams and graphs."""

from __future__ import annotations

from typing import Any

import gpu_device
import pytest
import torch
from array_cases import GPU_LIBRARIES, arguments, attention_of, converter, table_of, to_tensor
from attention_batch import EngineState, logit_size, torch_threads
from engine_memory import Layout
from gpu_batches import batch
from gpu_specs import spec
from numeric import assert_bitwise_equal, assert_close, assert_lse_close

from fi_backend import arrays, merge_state

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

BATCHES = {
    "bf16, block table": lambda: batch(
        spec=spec("128", 8, 2, page_size=16, sinks=True),
        q_lens=(1, 40, 1),
        kv_lens=(700, 90, 33),
        layout=Layout(k="packed", v="packed", q="qkv", first_token=2, extra_tokens=5),
    ),
    "alibi, token table": lambda: batch(
        spec=spec("transform 128", 4, 4, page_size=16, alibi=True),
        q_lens=(3, 130),
        kv_lens=(300, 130),
        layout=Layout(table="token"),
    ),
    "fp16, csr": lambda: batch(
        spec=spec("fp16 64", 4, 1, page_size=3, window_left=50),
        q_lens=(2, 1),
        kv_lens=(300, 64),
        layout=Layout(table="csr", k="hnd", v="strided"),
    ),
    "fp8, contiguous": lambda: batch(
        spec=spec("e4m3 128", 6, 2),
        q_lens=(5, 1),
        kv_lens=(65, 1000),
        layout=Layout(table="ragged"),
        k_scale=(0.5, 2.0),
        v_scale=0.25,
    ),
}


def prepared(name: str, library: str) -> tuple[EngineState, arrays.BatchAttention, Any]:
    convert = converter(library, gpu_device.device())
    state = EngineState(BATCHES[name]())
    attention = attention_of(state, convert)
    return state, attention, convert


def tensors(state: EngineState) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.queries(), state.k_cache, state.v_cache


def starts_of(state: EngineState) -> torch.Tensor:
    return torch.tensor([state.batch.layout.first_token, *state.batch.q_lens]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("library", GPU_LIBRARIES)
@pytest.mark.parametrize("name", BATCHES)
def test_values_and_bits(name: str, library: str) -> None:
    with torch_threads(1):
        state, attention, convert = prepared(name, library)
        expected, expected_lse, amplitude = state.expected()
        same, same_lse = state.run(state.attention())
        q, k, v = map(convert, tensors(state))
        out, lse = attention.run(q, k, v, return_lse=True, **arguments(state, convert))
        assert type(out) is type(lse) is type(q)
        rows, sums = state.inside(to_tensor(out, state.q.dtype)), state.inside(to_tensor(lse))
    slack = logit_size(state.batch)
    assert_close("out", rows, expected, amplitude=amplitude, slack=slack)
    assert_lse_close("lse", sums, expected_lse, slack=slack)
    assert_bitwise_equal("out", rows, state.inside(same))
    assert_bitwise_equal("lse", sums, state.inside(same_lse))


def test_a_call_follows_what_its_stream_has_queued() -> None:
    """Queries that are still being computed on another stream than the default one are waited for."""
    gpu_device.only_on_cuda()
    state, attention, _ = prepared("bf16, block table", "torch")
    q, k, v = tensors(state)
    options, table = arguments(state, lambda t: t), table_of(state, lambda t: t)
    expected = attention.run(q, k, v, **options).clone()
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), gpu_device.no_waiting():
        attention.plan(starts_of(state), table)
        gpu_device.occupy(50)
        late.copy_(q)
        out = attention.run(late, k, v, **options)
        rest = out + 0
    torch.cuda.synchronize()
    # Rows that no request owns hold whatever their memory held.
    assert_bitwise_equal("out", state.inside(rest.cpu()), state.inside(expected.cpu()))


def test_a_plan_waits_for_launches_on_another_stream() -> None:
    """The next plan is uploaded to where the last one lies, which a launch on another stream still reads."""
    gpu_device.only_on_cuda()
    state, attention, _ = prepared("bf16, block table", "torch")
    q, k, v = tensors(state)
    options = arguments(state, lambda t: t)
    expected = attention.run(q, k, v, **options).clone()
    shorter = arrays.PageTable.from_block_table(
        state.table.indices, torch.clamp(state.kv_lens.cpu() - 20, min=1), page_size=16
    )
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with gpu_device.no_waiting():
        with torch.cuda.stream(stream):
            gpu_device.occupy(50)
            out = attention.run(q, k, v, **options)
        attention.plan(starts_of(state), shorter)
        later = attention.run(q, k, v, **options)
    torch.cuda.synchronize()
    assert_bitwise_equal("out", state.inside(out.cpu()), state.inside(expected.cpu()))
    assert not torch.equal(state.inside(later.cpu()), state.inside(expected.cpu()))


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_captured_call_serves_later_plans(library: str) -> None:
    gpu_device.only_on_cuda()
    state, attention, convert = prepared("fp16, csr", library)
    q, k, v = map(convert, tensors(state))
    out = convert(torch.zeros_like(tensors(state)[0]))
    stream = torch.cuda.Stream()
    attention.run(q, k, v, out=out, stream=stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        attention.run(q, k, v, out=out, stream=stream)
    for shorter in (0, 1, 7):
        state.kv_lens -= shorter
        lens = state.kv_lens.cpu()
        table = arrays.PageTable.from_csr(
            torch.cat([state.table.row_begin, state.table.row_end[-1:]]).cpu(),
            convert(state.table.indices),
            page_size=3,
            kv_lens=lens,
        )
        starts = starts_of(state)
        attention.plan(starts, table, stream=stream)
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        got = to_tensor(out, state.q.dtype).clone()
        expected = attention.run(*tensors(state))
        torch.cuda.synchronize()
        assert_bitwise_equal("out", state.inside(got), state.inside(expected.cpu()))


def test_many_plans_may_be_under_way() -> None:
    state, attention, convert = prepared("bf16, block table", "torch")
    q, k, v = tensors(state)
    options = arguments(state, convert)
    expected = attention.run(q, k, v, **options).clone()
    gpu_device.occupy(30)
    shorter = torch.clamp(state.kv_lens.cpu() - 20, min=1)
    for i in range(11):
        lens = state.kv_lens.cpu() if i % 2 == 0 else shorter
        table = arrays.PageTable.from_block_table(state.table.indices, lens, page_size=16)
        attention.plan(starts_of(state), table)
        out = attention.run(q, k, v, **options)
    gpu_device.synchronize()
    assert_bitwise_equal("out", state.inside(out.cpu()), state.inside(expected.cpu()))


@pytest.mark.parametrize("library", GPU_LIBRARIES)
def test_merges_and_appends(library: str) -> None:
    there = gpu_device.device()
    convert = converter(library, there)
    # Drawn on the host: a capture that failed leaves the GPU's generator unusable.
    o, sums = torch.randn(2, 7, 4, 64).half().to(there), torch.randn(2, 7, 4).to(there)
    expected = merge_state(o[0], sums[0], o[1], sums[1])
    got = arrays.merge_state(*map(convert, (o[0], sums[0], o[1], sums[1])))
    for ours, theirs in zip(got, expected, strict=True):
        assert_bitwise_equal("state", to_tensor(ours), theirs.cpu())
    if library == "jax":
        return
    caches = [torch.zeros(3, 8, 4, 64, dtype=torch.float16, device=there) for _ in "kv"]
    slots = torch.tensor([5, -1, 23, 0], device=there)
    arrays.append_kv(*map(convert, (o[0], o[1], *caches, slots)), k_scale=0.5)
    gpu_device.synchronize()
    assert_bitwise_equal("k", caches[0].view(24, 4, 64)[slots[[0, 2, 3]]].cpu(), 2 * o[0][[0, 2, 3]].cpu())
    assert int((caches[1] != 0).any(3).any(2).sum()) == 3
