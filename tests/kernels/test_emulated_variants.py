# SPDX-License-Identifier: Apache-2.0
"""Shipped variants in the kernels for GPUs, on an emulated one, and shared prefixes under variants."""

from __future__ import annotations

import emulator_modules
import pytest
from variant_cases import ORACLES, VariantBatch, arguments, check_shared_prefix, check_variant

from fi_backend import AttentionSpec
from fi_backend.core import jit, kernels
from fi_backend.core.variant_names import find_variant

# Weights without a softmax, a mask, a functor of outputs, norms of queries and keys: one of each kind.
NAMES = ("flash_sigmoid", "sink_window", "output_gate", "qk_norm")
ARCH = "sm_90a"
BATCHES = {
    "decode": VariantBatch(dtype="bfloat16", q_lens=(1, 1, 3), kv_lens=(1, 333, 130), heads=(8, 2), seed=1),
    "prefill": VariantBatch(dtype="bfloat16", q_lens=(150, 0, 9), kv_lens=(150, 5, 290), heads=(4, 2)),
    "split": VariantBatch(dtype="bfloat16", heads=(6, 2), page_size=5, k_scale=0.5, split=True, seed=2),
}


# Rows of two heads in tiles of 16, 64 and 128: keys that one warp reads, or several row groups. Warps that
# share columns, and those that are left in the batch-invariant mode.
TURNED = {
    "heads of 80": VariantBatch(dtype="bfloat16", head_dim=80, q_lens=(1, 30, 90), kv_lens=(700, 95, 90)),
    "batch-invariant, wide heads": VariantBatch(
        dtype="bfloat16",
        head_dim=256,
        q_lens=(1, 30, 90),
        kv_lens=(700, 95, 90),
        k_scale=0.5,
        options={"batch_invariant": True},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile them side by side."""
    plain, invariant = AttentionSpec(4, 2, 64), AttentionSpec(4, 2, 64, batch_invariant=True)
    layers = [(plain, find_variant(name)) for name in NAMES] + [(invariant, find_variant(NAMES[0]))]
    layers += [(AttentionSpec(4, 2, b.head_dim, **b.options), find_variant("rope")) for b in TURNED.values()]
    jit.build_all(
        [
            kernels.with_variant(emulator_modules.attention_module(spec, ARCH, variant=variant), variant)
            for spec, variant in layers
        ]
    )


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ready", set())
    emulator_modules.install(ARCH, monkeypatch.setattr)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_variant(name: str, batch: VariantBatch) -> None:
    check_variant(name, ORACLES[name], arguments(name, batch), batch)


@pytest.mark.usefixtures("emulated")
def test_weights_without_a_softmax_in_the_batch_invariant_mode() -> None:
    """Warps that share a tile have no maxima to tell, and must not overwrite weights that others read."""
    options = {"batch_invariant": True}
    lens = {"q_lens": (1, 2, 40), "kv_lens": (900, 1150, 700)}
    batch = VariantBatch(dtype="bfloat16", heads=(8, 2), options=options, **lens)
    check_variant(NAMES[0], ORACLES[NAMES[0]], arguments(NAMES[0], batch), batch)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("batch", TURNED.values(), ids=TURNED)
def test_keys_that_turn(batch: VariantBatch) -> None:
    check_variant("rope", ORACLES["rope"], arguments("rope", batch), batch)


@pytest.mark.usefixtures("emulated")
def test_a_shared_prefix() -> None:
    check_shared_prefix("qk_norm", VariantBatch(dtype="bfloat16", heads=(8, 2)))


@pytest.mark.parametrize("name", ["soft_cap", "output_scale", "qk_norm"])
def test_a_shared_prefix_on_a_cpu(name: str) -> None:
    check_shared_prefix(name, VariantBatch(heads=(8, 2)))
