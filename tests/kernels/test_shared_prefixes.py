# SPDX-License-Identifier: Apache-2.0
"""Composed steps on the CPU: the oracle's numbers, and equal bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, counters, torch_threads
from attention_strategies import ROOMY, shared_batches
from engine_memory import Layout
from examples import share
from hypothesis import event, given
from numeric import assert_bitwise_equal, assert_close, assert_lse_close

from fi_backend.core.plan import PREFIX
from fi_backend.core.sharing import flat_reason
from fi_backend.core.spec import AttentionSpec

PAIRS = [
    ("float32", "float32", 120),
    ("bfloat16", "bfloat16", 80),
    ("float16", "float16", 30),
    ("bfloat16", "float8_e4m3fn", 40),
    ("float16", "float8_e5m2", 20),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "count"), PAIRS, ids=[f"{q}-{kv}" for q, kv, _ in PAIRS])
def test_any_shared_batch_equals_the_oracle(dtype: str, kv_dtype: str, count: int) -> None:
    @share(count)
    @given(shared_batches(dtype, kv_dtype))
    def run(batch: Batch) -> None:
        nodes = check(batch).plan.header["num_nodes"]
        event(f"nodes: {min(nodes, 2)}")
        assert not (nodes and flat_reason(batch.spec))

    run()


# Sharing pays wherever it saves a key.
EAGER = replace(SPLIT_COSTS, alpha=0, part_cost=0)


def tree(spec: AttentionSpec, **changes: Any) -> Batch:
    """Two groups behind one prefix, one request without it, queries of one to three tokens, in no order."""
    page = spec.page_size
    q_lens = (1, 2, 1, 1, 3, 1, 1, 2)
    shares = ((0, 0), (0, 0), (0, 9), (0, 5), (2, 9), (3, 12), (0, 5), (5, 12))
    own = (9 * page + 20, 70, 33, 7 * page + 9, 15, 40, 100, 8)
    kv_lens = tuple(n * page + k for (_, n), k in zip(shares, own, strict=True))
    batch = Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, shares=shares, sharing=ROOMY, costs=EAGER)
    return replace(batch, num_ctas=2, **changes)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (10, 2), (7, 1), (4, 4), (64, 1)])
def test_two_levels_of_any_group(page_size: int, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, 64, dtype="float32", page_size=page_size)
    state = check(tree(spec))
    nested = {int(node["kv_end"]) // page_size for node in state.plan.nodes}
    assert {9, 12} <= nested, "a group of 64 fills tiles so soon that the node of five pages saves nothing"
    assert 5 in nested or heads == 64


@pytest.mark.parametrize(
    "change",
    [{"logits_soft_cap": 2.0}, {"sinks": True}, {"causal": False}, {"scale": -0.2}, {"head_dim_v": 33}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("table", ["block", "token", "csr"])
def test_variants_that_compose(change: dict[str, Any], table: str) -> None:
    spec = replace(AttentionSpec(10, 2, 64, dtype="bfloat16", page_size=16), **{"head_dim_v": 64} | change)
    layout = Layout(table=table, first_token=2, extra_tokens=3, q="qkv", out="heads", k="packed", v="packed")
    assert check(tree(spec, layout=layout)).plan.header["num_nodes"] >= 3


def test_planned_queues_run_composed_plans() -> None:
    spec = AttentionSpec(10, 2, 64, dtype="float32", page_size=16)
    assert check(tree(spec, planned_queues=True)).plan.header["num_nodes"] >= 3


@pytest.mark.parametrize(
    "change",
    [{"window_left": 1000}, {"batch_invariant": True}, {"custom_mask": True}, {"alibi": True}],
    ids=lambda change: next(iter(change)),
)
def test_variants_that_do_not_are_planned_flat(change: dict[str, Any]) -> None:
    spec = replace(AttentionSpec(10, 2, 64, dtype="float32", page_size=16), **change)
    assert flat_reason(spec)
    state = check(tree(spec))
    assert state.plan.header["num_nodes"] == 0
    without = EngineState(tree(spec, sharing=None))
    without.attention()
    assert state.plan.tobytes() == without.plan.tobytes()


def test_bits_do_not_depend_on_threads_or_on_the_launch_before() -> None:
    """Members of a node straddle two tiles, and nodes and own rows are split."""
    spec = AttentionSpec(20, 1, 64, dtype="bfloat16", page_size=16)
    q_lens = (1, 2, 1, 3, 1, 2) * 3
    shares = ((0, 0), *((0, 40) for _ in range(17)))
    kv_lens = (660, *(640 + 37 + 11 * i for i in range(17)))
    batch = Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, shares=shares, sharing=ROOMY, num_ctas=16,
                  costs=SPLIT_COSTS)  # fmt: skip
    with torch_threads(1):
        state = EngineState(batch)
        attn = state.attention()
        items = state.plan.items
        node = items[items["flags"] == PREFIX]
        assert len(set(node["q_begin"])) == 5, "600 rows are five tiles"
        assert len(set(node["kv_begin"])) > 1, "and they are split"
        out, lse = state.run(attn, threads=1)
        o, expected_lse, amplitude = state.expected()
        assert_close("out", state.inside(out), o, amplitude=amplitude)
        assert_lse_close("lse", state.inside(lse), expected_lse)
        for threads in (2, 3, 5, 2, 1):
            again, lse_again = state.run(attn, threads=threads)
            assert_bitwise_equal("out", again, out)
            assert_bitwise_equal("lse", lse_again, lse)
            assert not counters(attn).any()
