# SPDX-License-Identifier: Apache-2.0
"""The shipped variants against their definitions in float64, on the CPU."""

from __future__ import annotations

import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from variant_cases import ORACLES, Oracle, VariantBatch, arguments, check_variant, logits

MIXED = VariantBatch()
BATCHES = {
    "mixed": MIXED,
    "split": VariantBatch(split=True, heads=(6, 2), seed=1),
    "decode": VariantBatch(q_lens=(1, 1, 1), kv_lens=(1, 513, 130), heads=(8, 1), seed=2),
    "prefill": VariantBatch(q_lens=(70, 0, 9), kv_lens=(70, 5, 90), heads=(3, 3), page_size=5, seed=3),
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ORACLES)
def test_float32(name: str, batch: VariantBatch) -> None:
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


@pytest.mark.parametrize("name", ["rope", "qk_norm", "flash_sigmoid", "sink_window"])
def test_fp8_caches(name: str) -> None:
    """Transformed keys are dequantised ones: a scale must act before a norm."""
    batch = VariantBatch(dtype="bfloat16", kv_dtype="float8_e4m3fn", k_scale=0.25, split=True, seed=4)
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 200)), min_size=1, max_size=4)


@share(12)
@given(
    name=st.sampled_from(sorted(ORACLES)),
    requests=REQUESTS.filter(lambda pairs: any(q for q, _ in pairs)),
    heads=st.sampled_from([(1, 1), (6, 2), (5, 1)]),
    page_size=st.integers(1, 40),
    split=st.booleans(),
    seed=st.integers(0, 100),
)
def test_any_batch(name, requests, heads, page_size, split, seed) -> None:
    batch = VariantBatch(
        q_lens=tuple(q for q, _ in requests),
        kv_lens=tuple(q + more for q, more in requests),
        heads=heads,
        page_size=page_size,
        split=split,
        seed=seed,
    )
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


@pytest.mark.parametrize("name", ["flash_sigmoid", "qk_norm"])
def test_the_batch_invariant_mode(name: str) -> None:
    batch = VariantBatch(options={"batch_invariant": True}, kv_lens=(2000, 64, 1100, 700), seed=5)
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


@pytest.mark.parametrize(
    "options", [{"window_left": 20}, {"logits_soft_cap": 2.0}], ids=["window", "soft-cap"]
)
def test_options_of_the_spec_stay_in_force(options: dict[str, object]) -> None:
    def scaled(r, args):
        x = logits(r)
        return 2 * torch.tanh(x / 2) + args["bias"] if "logits_soft_cap" in options else x + args["bias"]

    oracle = Oracle(
        logits=scaled,
        visible=lambda r, _: r.distance >= -20 if "window_left" in options else r.distance <= 0,
        weights=torch.sigmoid,
    )
    check_variant("flash_sigmoid", oracle, {"bias": -1.0}, VariantBatch(options=options))
