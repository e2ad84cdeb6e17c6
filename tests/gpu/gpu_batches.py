# SPDX-License-Identifier: Apache-2.0
"""Batches for the CUDA kernels: hypothesis draws them over every run-time option of a compiled module."""

from __future__ import annotations

from typing import Any

import gpu_device
from attention_batch import SPLIT_COSTS, Batch
from engine_memory import Layout
from gpu_specs import MODULES, spec
from hypothesis import strategies as st

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64)
PAGE_SIZES = (1, 3, 16, 64, 128)
Q_LENS = (0, 1, 2, 3, 5, 17, 33, 64, 100, 300)
KV_LENS = (0, 1, 63, 64, 65, 128, 129, 1000, 5000)
CACHES = ("nhd", "hnd", "packed", "strided", "heads")
# Elements of q, and of K and V, in one drawn batch: what the host makes in some milliseconds.
Q_SIZE, KV_SIZE = 800_000, 1_500_000


def batch(**fields: Any) -> Batch:
    """A Batch on the device under test; small lengths are cut into many chunks, for as many CTAs."""
    return Batch(**({"device": gpu_device.device(), "num_ctas": 24, "costs": SPLIT_COSTS} | fields))


def layouts() -> st.SearchStrategy[Layout]:
    kinds = st.sampled_from(CACHES)
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
def batches(draw: st.DrawFn, module: str) -> Batch:
    """0 .. 6 requests of any lengths through one compiled module."""
    fixed = MODULES[module]
    group = draw(st.sampled_from(GROUPS))
    heads = draw(st.integers(1, 4 if group < 12 else 1))
    options: dict[str, Any] = {
        "page_size": draw(st.sampled_from(PAGE_SIZES)),
        "scale": draw(st.sampled_from((0.0, 0.0, 0.3))),
        "causal": draw(st.booleans()),
        "window_left": draw(st.one_of(st.just(-1), st.just(-1), st.integers(0, 20), st.integers(0, 1000))),
        "sinks": draw(st.booleans()),
    }
    if "transform" in module:
        options["logits_soft_cap"] = draw(st.sampled_from((0.0, 2.0, 30.0)))
        options["alibi"] = options["logits_soft_cap"] == 0 or draw(st.booleans())
    layer = spec(module, group * heads, heads, **options)
    requests = draw(st.sampled_from((1, 2, 3, 6, 0)))
    each = max(1, requests)
    most_tokens = max(4, Q_SIZE // (layer.num_qo_heads * layer.head_dim) // each)
    longest = max(130, KV_SIZE // (heads * layer.head_dim) // each)
    q_lens, kv_lens = [], []
    for _ in range(requests):
        q_lens.append(min(most_tokens, draw(st.one_of(st.just(1), st.sampled_from(Q_LENS)))))
        kv_len = draw(st.one_of(st.sampled_from(KV_LENS), st.integers(0, 200), st.integers(0, 3000)))
        kv_lens.append(min(longest, kv_len))
    mask = fixed.get("custom_mask", False)
    host = mask or draw(st.booleans())
    slack: tuple[int, ...] = ()
    if host and not mask and draw(st.booleans()):
        slack = tuple(draw(st.sampled_from((0, 1, 17, 700))) for _ in range(requests))
    scales: st.SearchStrategy[Any] = st.just(1.0)
    if "kv_dtype" in fixed:
        each_head = st.lists(st.sampled_from((0.25, 0.5, 1.0, 2.0)), min_size=heads, max_size=heads)
        scales = st.one_of(st.sampled_from((0.25, 1.0, 1.5)), each_head.map(tuple))
    num_ctas, costs = draw(
        st.sampled_from(((16, SPLIT_COSTS), (64, SPLIT_COSTS), (1, SPLIT_COSTS), (132, None)))
    )
    return batch(
        spec=layer,
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        layout=draw(layouts()),
        bound_slack=slack,
        k_scale=draw(scales),
        v_scale=draw(scales),
        gain=draw(st.sampled_from((1.0, 4.0))),
        num_ctas=num_ctas,
        costs=costs,
        planned_queues=host and draw(st.booleans()),
        host_lengths=host,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
