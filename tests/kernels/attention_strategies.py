# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies that draw batches over every option of AttentionSpec and every memory layout."""

from __future__ import annotations

from dataclasses import replace

from attention_batch import SPLIT_COSTS, Batch
from engine_memory import Layout
from hypothesis import strategies as st

from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

PAGE_SIZES = (1, 3, 8, 16, 48, 64, 128, 512)
USUAL_DIMS = (64, 128, 80, 96, 256)
# Multiply-adds of one oracle call, and elements of q and out: tens of milliseconds an example.
WORK, SIZE = 80_000_000, 600_000


def layouts() -> st.SearchStrategy[Layout]:
    kinds = st.sampled_from(("nhd", "hnd", "packed", "strided", "heads"))
    return st.builds(
        Layout,
        table=st.sampled_from(("block", "token", "csr", "ragged")),
        k=kinds,
        v=kinds,
        q=st.sampled_from(("plain", "qkv")),
        out=st.sampled_from(("plain", "heads")),
        raw_fp8=st.booleans(),
        first_token=st.sampled_from((0, 0, 2)),
        extra_tokens=st.sampled_from((0, 0, 5)),
    )


@st.composite
def batches(draw: st.DrawFn, dtype: str, kv_dtype: str) -> Batch:
    """A batch of 0..5 requests of any query and KV lengths, more queries than keys included."""
    group = draw(st.one_of(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8)), st.integers(1, 64)))
    heads = draw(st.integers(1, 4 if group < 16 else 1))
    dims = st.one_of(st.sampled_from(USUAL_DIMS), st.integers(1, 512))
    head_dim = draw(dims)
    layout = draw(layouts())
    spec = AttentionSpec(
        group * heads,
        heads,
        head_dim,
        head_dim_v=draw(st.one_of(st.just(head_dim), dims)),
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        scale=draw(st.sampled_from((None, None, 0.3, -0.2))),  # type: ignore[arg-type]
        causal=draw(st.booleans()),
        window_left=draw(st.one_of(st.just(-1), st.just(-1), st.integers(0, 20), st.integers(0, 1000))),
        logits_soft_cap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
        custom_mask=draw(st.sampled_from((False, False, True))),
        batch_invariant=draw(st.booleans()),
    )
    requests = draw(st.sampled_from((1, 2, 2, 3, 5, 0)))
    budget = WORK // (spec.num_qo_heads * (spec.head_dim + 2 * spec.head_dim_v + 64))
    most_tokens = max(4, SIZE // (spec.num_qo_heads * (spec.head_dim + spec.head_dim_v)))
    q_lens, kv_lens = [], []
    for _ in range(requests):
        q_len = draw(st.one_of(st.just(1), st.integers(0, 8), st.integers(0, 200)))
        q_len = min(q_len, most_tokens // requests + 1)
        longest = max(50, min(2000, budget // (max(1, q_len) * requests)))
        q_lens.append(q_len)
        kv_lens.append(draw(st.one_of(st.integers(0, min(70, longest)), *[st.integers(0, longest)] * 2)))
    exact = spec.custom_mask or draw(st.booleans())
    slack = () if exact else tuple(draw(st.sampled_from((0, 1, 17, 700))) for _ in range(requests))
    scales = st.one_of(
        st.just(1.0),
        st.sampled_from((0.25, 1.5)),
        st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0)), min_size=heads, max_size=heads).map(tuple),
    )
    num_ctas, costs = draw(
        st.sampled_from(((16, SPLIT_COSTS), (16, SPLIT_COSTS), (1, SPLIT_COSTS), (2, None)))
    )
    return Batch(
        spec=spec,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        layout=layout,
        bound_slack=slack,
        k_scale=draw(scales),
        v_scale=draw(scales),
        gain=draw(st.sampled_from((1.0, 4.0))),
        num_ctas=num_ctas,
        planned_queues=draw(st.booleans()),
        costs=costs,
        seed=draw(st.integers(0, 2**32 - 1)),
    )


ROOMY = SharingLimits(max_nodes=16, max_levels=8, max_tokens=600)


@st.composite
def shared_batches(draw: st.DrawFn, dtype: str, kv_dtype: str) -> Batch:
    """Requests that begin with pages of earlier ones, in a batch of otherwise any kind."""
    batch = draw(batches(dtype, kv_dtype))
    spec = batch.spec
    if draw(st.integers(0, 5)):  # what is never composed, now and then
        spec = replace(spec, window_left=-1, alibi=False, custom_mask=False, batch_invariant=False)
    if batch.layout.table == "ragged":
        batch = replace(batch, layout=replace(batch.layout, table="block"))
    requests = draw(st.integers(2, 7))
    budget = max(
        2, 3 * WORK // (spec.num_qo_heads * (spec.head_dim + 2 * spec.head_dim_v + 64) * requests * 2)
    )
    longest = min(900, budget)
    q_lens, kv_lens, shares = [], [], []
    for r in range(requests):
        q_len = min(draw(st.one_of(st.just(1), st.just(1), st.integers(0, 6), st.integers(0, 40))), longest)
        source = draw(st.integers(0, max(0, r - 1)))
        most = kv_lens[source] // spec.page_size if r else 0
        pages = draw(st.one_of(st.just(most), st.integers(0, most)))
        own = draw(st.one_of(st.integers(q_len, q_len + 70), st.integers(0, longest)))
        q_lens.append(q_len)
        kv_lens.append(pages * spec.page_size + own)
        shares.append((source, pages))
    costs = draw(st.sampled_from((SPLIT_COSTS, SPLIT_COSTS, None)))
    limits = st.builds(SharingLimits, st.integers(1, 3), st.integers(1, 2), st.integers(1, 9))
    return replace(
        batch,
        spec=spec,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        shares=tuple(shares),
        sharing=draw(st.one_of(st.just(ROOMY), st.just(ROOMY), limits)),
        bound_slack=(),
        costs=costs,
        num_ctas=draw(st.sampled_from((1, 2, 16))),
    )
