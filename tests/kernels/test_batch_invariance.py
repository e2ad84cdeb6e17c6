# SPDX-License-Identifier: Apache-2.0
"""Equal bits: in the batch-invariant mode a row depends on its request's tokens and position alone.

Elsewhere the bits follow from the plan: other threads, other queues or other pages change nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_batch import SPLIT_COSTS
from engine_memory import Layout
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from numeric import assert_bitwise_equal
from sequences import Sequence, compute
from torch import Tensor

from fi_backend.core.planner import CostModel
from fi_backend.core.spec import AttentionSpec

PAIRS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]


def assert_same(name: str, actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_bitwise_equal(f"out of {name}", actual[0], expected[0])
    assert_bitwise_equal(f"lse of {name}", actual[1], expected[1])


def specs(dtype: str, kv_dtype: str) -> st.SearchStrategy[AttentionSpec]:
    return st.builds(
        lambda heads, group, head_dim, **options: AttentionSpec(
            heads * group, heads, head_dim, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True, **options
        ),
        heads=st.integers(1, 2),
        group=st.sampled_from((1, 2, 3, 4, 8)),
        head_dim=st.sampled_from((64, 128, 40, 17)),
        page_size=st.sampled_from((16, 8, 1)),
        window_left=st.sampled_from((-1, -1, 0, 50, 130, 333)),
        logits_soft_cap=st.sampled_from((0.0, 20.0)),
        alibi=st.booleans(),
        sinks=st.booleans(),
    )


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_any_split_batch_bound_and_worker_count_gives_equal_bits(dtype: str, kv_dtype: str) -> None:
    """The whole prompt at once against any chunked prefill of it, beside any other requests."""

    @share(40)
    @given(specs(dtype, kv_dtype), st.data())
    def run(spec: AttentionSpec, data: st.DataObject) -> None:
        length = data.draw(st.integers(2, 500), label="length")
        sequence = Sequence.random(spec, length, seed=1)
        # A chunk of one KV tile, and chunks of several: where tiles begin matters in the latter only.
        grid = data.draw(st.sampled_from((64, 192, 256)), label="grid")
        costs = replace(SPLIT_COSTS, invariant_grid=grid)
        [(out, lse)] = compute(spec, [(sequence, 0, length)], num_ctas=1, costs=costs)
        cuts = data.draw(
            st.lists(st.integers(1, length - 1), max_size=4, unique=True).map(sorted), label="cuts"
        )
        if data.draw(st.booleans(), label="decode the last token alone"):
            cuts = sorted({*cuts, length - 1})
        for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
            parts = [(sequence, begin, end)]
            for n, other in enumerate(data.draw(st.lists(st.integers(1, 300), max_size=3), label="others")):
                parts.append((Sequence.random(spec, other, seed=2 + n), max(0, other - 1 - 5 * n), other))
            place = data.draw(st.integers(0, len(parts) - 1), label="place")
            parts[0], parts[place] = parts[place], parts[0]
            results = compute(
                spec,
                parts,
                slack=data.draw(st.sampled_from((0, 1, 63, 64, 1000)), label="slack"),
                num_ctas=data.draw(st.sampled_from((1, 2, 16, 64)), label="num_ctas"),
                threads=data.draw(st.integers(1, 3), label="threads"),
                planned_queues=data.draw(st.booleans(), label="planned queues"),
                costs=costs,
            )
            assert_same(f"tokens {begin}..{end}", results[place], (out[begin:end], lse[begin:end]))

    run()


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("q_len", [1, 3])
def test_t35_the_hosts_length_bound_does_not_reach_the_bits(dtype: str, kv_dtype: str, q_len: int) -> None:
    """An engine's padded maximum length chose the split, and with it the bits of every request."""
    spec = AttentionSpec(8, 2, 64, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True)
    parts = [(Sequence.random(spec, n, n), n - q_len, n) for n in (700, 64, 1500)]
    exact = compute(spec, parts, num_ctas=24, costs=CostModel())
    for slack in (1, 500, 4096, 100_000):
        for n, (a, b) in enumerate(
            zip(compute(spec, parts, slack=slack, num_ctas=24, costs=CostModel()), exact, strict=True)
        ):
            assert_same(f"request {n} with {slack} tokens of slack", a, b)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_t36_a_shorter_neighbour_leaves_the_other_rows_alone(dtype: str, kv_dtype: str) -> None:
    """Lengths 900, 1000, 120, 500: taking 100 tokens off the first one changed rows of the other three."""
    spec = AttentionSpec(32, 8, 128, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True)
    sequences = [Sequence.random(spec, n, n) for n in (900, 1000, 120, 500)]

    def decode(first: int) -> list[tuple[Tensor, Tensor]]:
        lens = (first, 1000, 120, 500)
        return compute(spec, [(s, n - 1, n) for s, n in zip(sequences, lens, strict=True)], num_ctas=132)

    before = decode(900)
    for first in (899, 800, 1):
        for n, (a, b) in enumerate(zip(decode(first)[1:], before[1:], strict=True), start=1):
            assert_same(f"request {n} beside {first} tokens", a, b)


@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_t37_the_batch_size_does_not_pick_another_tile(dtype: str, kv_dtype: str, group: int) -> None:
    """With two query heads a KV head, one request and many chose tiles of different heights."""
    spec = AttentionSpec(2 * group, 2, 64, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=True)
    sequence = Sequence.random(spec, 333, 0)
    [alone] = compute(spec, [(sequence, 325, 333)], num_ctas=16)
    others = [(Sequence.random(spec, 100, n), 100 - q, 100) for n, q in enumerate((1, 60, 8, 1, 1, 30, 1))]
    assert_same("a batch of eight", compute(spec, [*others, (sequence, 325, 333)], num_ctas=16)[-1], alone)
    for begin in range(325, 333):  # speculation of any depth, down to single tokens
        [(out, lse)] = compute(spec, [(sequence, begin, begin + 1)], num_ctas=16)
        assert_same(f"token {begin}", (out, lse), (alone[0][begin - 325 :][:1], alone[1][begin - 325 :][:1]))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("dtype", "kv_dtype"), PAIRS)
def test_bits_follow_from_the_plan_and_not_from_threads_queues_or_places(
    dtype: str, kv_dtype: str, invariant: bool
) -> None:
    spec = AttentionSpec(6, 2, 64, dtype=dtype, kv_dtype=kv_dtype, batch_invariant=invariant)
    parts = [(Sequence.random(spec, n, n), n - q, n) for n, q in ((900, 1), (333, 50), (64, 1), (5, 5))]
    first = compute(spec, parts, num_ctas=32)
    layouts = [
        Layout(),
        Layout(table="token"),
        Layout(table="csr", k="hnd", v="strided"),
        Layout(k="packed", v="packed"),
    ]
    for n, layout in enumerate(layouts):
        for planned in (False, True):
            again = compute(
                spec, parts, num_ctas=32, threads=1 + n, planned_queues=planned, layout=layout, page_seed=n
            )
            for request, (a, b) in enumerate(zip(again, first, strict=True)):
                assert_same(f"request {request} in {layout}, planned_queues={planned}", a, b)


def test_without_the_mode_another_split_gives_other_bits() -> None:
    """What the tests above would show if the mode were off: they compare bits that can differ."""
    spec = AttentionSpec(4, 1, 64, dtype="float32")
    parts = [(Sequence.random(spec, 1000, 0), 999, 1000)]
    [one], [many] = compute(spec, parts, num_ctas=1), compute(spec, parts, num_ctas=16)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same("16 CTAs", many, one)
    torch.testing.assert_close(many[0], one[0])
