# SPDX-License-Identifier: Apache-2.0
"""The torch operators: torch.compile(fullgraph=True) takes them and gives the eager bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, EngineState, torch_threads
from engine_memory import Layout
from numeric import assert_bitwise_equal
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fi_backend.core import attention_call
from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.merge import merge_state, merge_states
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, cap": {"window_left": 30, "logits_soft_cap": 20.0},
    "alibi, sinks": {"alibi": True, "sinks": True},
    "custom mask": {"custom_mask": True},
    "invariant": {"batch_invariant": True},
}


@pytest.fixture(autouse=True)
def fresh_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before is found: inductor's usual folder is one for all checkouts of a user."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def state_of(options: dict[str, Any], layout: Layout) -> EngineState:
    spec = AttentionSpec(6, 2, 64, head_dim_v=48, dtype="float32", **options)
    return EngineState(
        Batch(spec=spec, q_lens=(1, 30), kv_lens=(200, 40), layout=layout, num_ctas=8, costs=SPLIT_COSTS)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(table="ragged"), Layout(k="packed", v="packed")], ids=str
)
@pytest.mark.parametrize("given_out", [True, False])
def test_attention_inside_a_compiled_layer(options: dict[str, Any], layout: Layout, given_out: bool) -> None:
    """A layer that works on the queries before and on the output behind."""
    state = state_of(options, layout)
    attn = state.attention()

    def layer(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor) -> Tensor:
        attended = attn.run(
            q * 0.5,
            k,
            v,
            out=out,
            lse=lse,
            k_scale=0.5,
            v_scale=2.0,
            alibi_slopes=state.slopes,
            sinks=state.sinks,
        )
        return attended * 2 + 1

    def results(function: Callable[..., Any]) -> list[Tensor]:
        out, lse = state.outputs()
        y = function(state.queries(), state.k_cache, state.v_cache, out if given_out else None, lse)
        return [y, lse, *([out] if given_out else [])]

    with torch_threads(2):
        for eager, traced in zip(results(layer), results(compiled(layer)), strict=True):
            assert_bitwise_equal("compiled", traced, eager)
        assert not results(layer)[0].isnan().any()


def test_a_new_plan_reaches_a_compiled_function() -> None:
    """Lengths and pages are read when the operator runs, not when it is traced."""
    spec = AttentionSpec(4, 2, 64, dtype="float32")
    state = EngineState(Batch(spec=spec, q_lens=(1, 1), kv_lens=(90, 40), num_ctas=4, costs=SPLIT_COSTS))
    attn = state.attention()

    @compiled
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn.run(q, k, v)

    q = state.queries()
    before = layer(q, state.k_cache, state.v_cache)
    state.kv_lens.copy_(torch.tensor([33, 5]))
    attn.plan(torch.tensor([0, 1, 2], dtype=torch.int32), state.table)
    after = layer(q, state.k_cache, state.v_cache)
    assert_bitwise_equal("after the second plan", after, attn.run(q, state.k_cache, state.v_cache))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_append_inside_a_compiled_function(kv_dtype: str) -> None:
    key, value = torch.randn(5, 2, 64), torch.randn(5, 2, 48)
    slots = torch.tensor([3, -1, 20, 0, 31])
    caches = []
    for wrap in (lambda f: f, compiled):
        k, v = (torch.zeros(4, 8, 2, dim).to(getattr(torch, kv_dtype)) for dim in (64, 48))

        def append(k: Tensor, v: Tensor) -> Tensor:
            append_kv(key * 2, value, k, v, slots, k_scale=0.5)
            return k.float().sum()

        total = wrap(append)(k, v)
        assert total == k.float().sum() != 0
        caches.append((k, v))
    for traced, eager in zip(*caches, strict=True):
        assert_bitwise_equal("cache", traced, eager)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_append_and_attention_over_one_packed_cache_in_one_graph(backend: str) -> None:
    """K and V are views of one tensor that the graph writes and then reads, as under an engine."""
    random = torch.Generator().manual_seed(0)
    spec = AttentionSpec(4, 2, 64, dtype="float32")
    attn = BatchAttention(spec, max_requests=1, max_tokens=5, max_kv_len=64)
    blocks, lens = torch.arange(4, dtype=torch.int32)[None], torch.tensor([50], dtype=torch.int32)
    attn.plan(torch.tensor([0, 5], dtype=torch.int32), PageTable.from_block_table(blocks, lens, page_size=16))
    slots = torch.arange(45, 50)
    q, k, v = (torch.randn(5, heads, 64, generator=random) for heads in (4, 2, 2))
    history = torch.randn(4, 2, 16, 128, generator=random)

    def layer(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        tokens_first = cache.transpose(1, 2)
        k_cache, v_cache = tokens_first[..., :64], tokens_first[..., 64:]
        append_kv(k * 2, v, k_cache, v_cache, slots)
        return attn.run(q * 0.5, k_cache, v_cache) + 1

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        cache = history.clone()
        results.append((function(q, k, v, cache), cache))
    (eager, written), (traced, traced_cache) = results
    assert_bitwise_equal("out", traced, eager)
    assert_bitwise_equal("cache", traced_cache, written)
    assert not torch.equal(written, history)
    stale = attn.run(q * 0.5, *history.transpose(1, 2).split(64, dim=-1)) + 1
    assert not torch.equal(eager, stale), "the attention did not see what the graph had written"


def test_merge_inside_a_compiled_function() -> None:
    o, lse = torch.randn(7, 3, 4, 32), torch.randn(7, 3, 4)

    def merge(o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        pair = merge_state(
            o[:, 0].contiguous(), lse[:, 0].contiguous(), o[:, 1].contiguous(), lse[:, 1].contiguous()
        )
        return (*pair, *merge_states(o + 1, lse))

    for traced, eager in zip(compiled(merge)(o, lse), merge(o, lse), strict=True):
        assert_bitwise_equal("merged", traced, eager)


def test_fakes_have_the_shapes_of_the_real_results_and_touch_no_memory() -> None:
    with FakeTensorMode():
        o, lse = torch.empty(7, 3, 4, 32, dtype=torch.bfloat16), torch.empty(7, 3, 4)
        out, out_lse = torch.ops.fi_backend.merge_state(o[:, 0], lse[:, 0], o[:, 1], lse[:, 1], None)
        assert (out.shape, out.dtype, out_lse.shape, out_lse.dtype) == (
            (7, 4, 32), torch.bfloat16, (7, 4), torch.float32,
        )  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_attention_operator_declares_what_it_writes(options: dict[str, Any], monkeypatch: Any) -> None:
    """torch's own check of schema, fake and aliasing, on the very call that run() makes."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention_call, "_attention", lambda *arguments: calls.append(arguments))
    # Dense indices: the check clones its arguments, and a clone drops the gap behind the rows of a table.
    state = state_of(options, Layout(table="csr"))
    state.run(state.attention())
    [arguments] = calls
    monkeypatch.undo()
    torch.library.opcheck(torch.ops.fi_backend.attention.default, arguments)
