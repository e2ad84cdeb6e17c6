# SPDX-License-Identifier: Apache-2.0
"""The shipped variants, and one with raw PTX and a header of its own, against float64 on a GPU."""

from __future__ import annotations

import contextlib

import pytest
from gpu_device import capture, device, on_cuda
from numeric import assert_bitwise_equal
from serving_step import STEPS
from variant_cases import (
    ORACLES,
    SPLIT,
    Oracle,
    VariantBatch,
    arguments,
    check_climbing_maxima,
    check_shared_prefix,
    check_variant,
    logits,
)
from variant_serving import SPEC, VariantServing

from fi_backend import AttentionSpec, AttentionVariant
from fi_backend.core import jit, kernels
from fi_backend.core.sharing import flat_reason
from fi_backend.core.variant_names import find_variant
from fi_backend.errors import BuildError

pytestmark = pytest.mark.gpu

PTX = AttentionVariant(
    name="squashed",
    params={"sharpness": "float32"},
    headers={
        "squash.h": """
            #pragma once
            FI_DEVICE float squash(float x) {
            #if defined(__CUDA_ARCH__)
              float y;
              asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
              return y;
            #else
              return std::tanh(x);
            #endif
            }
        """
    },
    logits_transform="return params.sharpness * squash(logit);",
)
SQUASHED = Oracle(logits=lambda r, a: a["sharpness"] * logits(r).tanh())
THERE = {"device": device(), "num_ctas": None if on_cuda() else 4}
BATCHES = {
    "mixed": VariantBatch(**THERE, dtype="bfloat16", heads=(8, 2), kv_lens=(700, 64, 100, 9000)),
    "fp8": VariantBatch(
        **THERE, dtype="bfloat16", kv_dtype="float8_e4m3fn", heads=(8, 2), k_scale=0.5, seed=1
    ),
    "prefill": VariantBatch(
        **THERE, dtype="float16", q_lens=(300, 7), kv_lens=(300, 900), head_dim=128, seed=2
    ),
    "split": VariantBatch(**THERE, dtype="bfloat16", q_lens=(1, 1), kv_lens=(9000, 33), heads=(4, 1), seed=3),
}
SHARING = [name for name in ORACLES if not flat_reason(SPEC, find_variant(name))]
ORDER = ("decode", "mixed", "prefill", "two chunks", "decode", "idle", "mixed")


@pytest.fixture(scope="module", autouse=True)
def modules(needs_a_cuda_device: None) -> None:
    """Compile them side by side on a machine with a GPU; elsewhere as they are needed."""
    if not on_cuda():
        return
    modules = []
    for each in BATCHES.values():
        spec = AttentionSpec(4, 1, each.head_dim, dtype=each.dtype, kv_dtype=each.kv_dtype)
        for variant in map(find_variant, ORACLES):
            modules.append(kernels.with_variant(kernels.attention_module(spec, device(), variant), variant))
    # A module that does not compile fails the tests that load it, and not all the others.
    with contextlib.suppress(BuildError):
        jit.build_all(list(dict.fromkeys(modules)))


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", ORACLES)
def test_a_shipped_variant(name: str, batch: VariantBatch) -> None:
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


@pytest.mark.parametrize("name", ["rope", "rope_interleaved"])
def test_positions_without_offsets(name: str) -> None:
    """Tensors that are not given read as zeros."""
    batch = BATCHES["mixed"]
    frequencies = arguments(name, batch)["frequencies"]
    check_variant(name, ORACLES[name], {"frequencies": frequencies}, batch)


def test_maxima_that_climb_from_tile_to_tile() -> None:
    check_climbing_maxima("channel_scales", **THERE)


def test_raw_ptx_and_a_header_of_the_user() -> None:
    check_variant(PTX, SQUASHED, {"sharpness": 2.0}, BATCHES["mixed"])


def test_some_variants_share_prefixes() -> None:
    assert set(SHARING) == {"soft_cap", "output_scale", "qk_norm", "channel_scales"}


@pytest.mark.parametrize("host_lengths", [True, False], ids=["host plan", "device plan"])
@pytest.mark.parametrize("name", SHARING)
def test_what_depends_on_no_position_shares_prefixes(name: str, host_lengths: bool) -> None:
    batch = VariantBatch(
        device=device(), dtype="bfloat16", heads=(8, 2), host_lengths=host_lengths or not on_cuda()
    )
    check_shared_prefix(name, batch)


@pytest.mark.parametrize("on_device", [False, True], ids=["host plan", "device plan"])
@pytest.mark.parametrize("name", ORACLES)
def test_one_graph_replays_steps_of_other_lengths(name: str, on_device: bool) -> None:
    """Captured once; every replay gives the bits of an eager run, which the oracle confirms."""
    engine = VariantServing(name)
    eager, attn = (engine.attention(variant=name, costs=SPLIT) for _ in range(2))
    first = STEPS["two chunks"]
    engine.fill(first)
    engine.plan(attn, None if on_device else first)
    engine.run(attn)

    def step() -> None:
        if on_device:
            engine.plan(attn, None)
        engine.run(attn)

    replay = capture(step)
    checked = set()
    for name_of_step in ORDER:
        lengths = STEPS[name_of_step]
        engine.fill(lengths)
        engine.plan(eager, lengths)
        engine.run(eager)
        expected = engine.results()
        if name_of_step not in checked:
            engine.check(lengths)
            checked.add(name_of_step)
        engine.fill(lengths)
        if not on_device:
            engine.plan(attn, lengths)
        replay()
        for what, actual, bits in zip(("out", "lse"), engine.results(), expected, strict=True):
            assert_bitwise_equal(f"{what} of {name_of_step}", actual, bits)


def test_a_graph_reads_a_variant_s_tensors_anew() -> None:
    """Numbers stay those of the capture; what lies in a tensor is read by each replay."""
    engine = VariantServing("output_scale")
    attn = engine.attention(variant="output_scale")
    step = STEPS["decode"]
    engine.fill(step)
    engine.plan(attn, step)
    engine.run(attn)
    replay = capture(lambda: engine.run(attn))
    replay()
    engine.check(step)
    before, _ = engine.results()
    engine.arguments["scale"].mul_(-3)
    replay()
    engine.check(step)
    after, _ = engine.results()
    assert not after[: step.tokens].isclose(before[: step.tokens]).any()
