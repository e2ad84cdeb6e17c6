# SPDX-License-Identifier: Apache-2.0
"""BatchAttention on CUDA against the oracle: every module over random batches, and lists of what must work.

Memory that must not be read is NaN: outputs, workspaces, tails of pages, unused pages, padding of strides.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_batch import check
from engine_memory import Layout
from examples import share
from gpu_batches import CACHES, GROUPS, KV_LENS, PAGE_SIZES, Q_LENS, batch, batches
from gpu_specs import MODULES, spec
from hypothesis import given

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

PAIRS = [(q, kv) for kv in KV_LENS for q in Q_LENS]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("128", {}),
    "not causal": ("64", {"causal": False}),
    "window": ("128", {"window_left": 90}),
    "window 0": ("e4m3 128", {"window_left": 0}),
    "window, not causal": ("64", {"window_left": 70, "causal": False}),
    "sinks": ("fp16 64", {"sinks": True}),
    "soft cap": ("transform 128", {"alibi": False, "logits_soft_cap": 15.0}),
    "ALiBi": ("transform 128", {}),
    "ALiBi, cap, sinks, window": (
        "transform e4m3 64", {"logits_soft_cap": 30.0, "sinks": True, "window_left": 333},
    ),
    "mask": ("mask 128", {}),
    "mask, not causal, cap": ("transform mask 64", {"causal": False, "logits_soft_cap": 10.0}),
    "fp8": ("e4m3 128", {}),
    "256": ("256", {}),
    "256, fp8": ("e4m3 256", {"window_left": 200}),
    "192x128": ("192x128", {}),
    "invariant": ("invariant 64", {}),
    "invariant, fp8, window": ("invariant e4m3 128", {"window_left": 130, "sinks": True}),
    "invariant, ALiBi": ("invariant transform 64", {}),
    "invariant 256": ("invariant 256", {}),
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_any_batch_equals_the_oracle(module: str) -> None:
    @share(12)
    @given(batches(module))
    def run(drawn: Any) -> None:
        check(drawn)

    run()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "one chunk"])
def test_every_pair_of_lengths_in_one_batch(variant: str, split: bool) -> None:
    """Ninety requests, with more queries than keys among them."""
    module, options = VARIANTS[variant]
    layer = spec(module, 3, 1, **options)
    pairs = PAIRS if layer.custom_mask is False else [(q, kv) for q, kv in PAIRS if kv <= 1000]
    check(
        batch(
            spec=layer,
            q_lens=tuple(q for q, _ in pairs),
            kv_lens=tuple(kv for _, kv in pairs),
            num_ctas=4000 if split else 1,
            k_scale=0.5 if "e4m3" in module else 1.0,
        )
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("module", ["64", "128", "e4m3 128", "invariant 128"])
def test_every_group_size(group: int, module: str) -> None:
    heads = 2 if group <= 16 else 1
    scales = (0.25, 2.0)[:heads] if "e4m3" in module else 1.0
    check(
        batch(
            spec=spec(module, group * heads, heads),
            q_lens=(1, 2, 3, 70, 1, 17),
            kv_lens=(700, 64, 129, 200, 1, 9),
            k_scale=scales,
            v_scale=scales,
        )
    )


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("table", ["block", "token", "csr", "ragged"])
@pytest.mark.parametrize("module", ["128", "e4m3 64"])
def test_every_page_size_and_table(page_size: int, table: str, module: str) -> None:
    layer = spec(module, 8, 2, page_size=page_size)
    for n, kind in enumerate(CACHES):
        other = CACHES[(n + 1) % len(CACHES)] if n % 2 else kind
        layout = Layout(table=table, k=kind, v=other, raw_fp8=bool(n % 2))
        sample = batch(spec=layer, q_lens=(1, 3, 40), kv_lens=(300, 65, 130), layout=layout, seed=n)
        check(sample)
        check(replace(sample, host_lengths=False))


@pytest.mark.parametrize("module", ["e4m3 128", "e5m2 128", "fp16 e5m2 96", "e4m3 192x128", "fp16 e4m3 128"])
@pytest.mark.parametrize("scales", [(0.25, 0.5), ((0.25, 2.0), (0.5, 0.125)), ((0.25,), (0.5,))], ids=str)
def test_scales_of_fp8_caches(module: str, scales: Any) -> None:
    for table in ("block", "ragged"):
        check(
            batch(
                spec=spec(module, 8, 2),
                q_lens=(1, 9, 1),
                kv_lens=(80, 40, 500),
                layout=Layout(table=table),
                k_scale=scales[0],
                v_scale=scales[1],
                gain=8.0,
            )
        )


@pytest.mark.parametrize("module", ["64", "invariant 64"])
def test_empty_requests_and_empty_batches(module: str) -> None:
    layer = spec(module, 4, 2)
    for host in (True, False):
        for q_lens, kv_lens in (
            ((3, 0, 70, 0, 1, 4), (0, 50, 90, 0, 0, 4)),
            ((0, 0), (0, 9)),
            ((), ()),
            ((1,) * 24, tuple(0 if n % 3 else 11 * n for n in range(24))),
        ):
            check(batch(spec=layer, q_lens=q_lens, kv_lens=kv_lens, host_lengths=host))
