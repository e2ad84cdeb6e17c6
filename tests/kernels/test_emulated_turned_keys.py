# SPDX-License-Identifier: Apache-2.0
"""Keys turned on an emulated GPU: rotary embeddings, and which functor is asked."""

from __future__ import annotations

import math

import emulator_modules
import pytest
import torch
from variant_cases import ORACLES, Oracle, VariantBatch, arguments, check_variant, logits

from fi_backend import AttentionVariant
from fi_backend.core import kernels


@pytest.fixture(params=["sm_80", "sm_90a"], autouse=True)
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ready", set())
    emulator_modules.install(request.param, monkeypatch.setattr)


@pytest.mark.parametrize("whole", [True, False])
def test_rope(whole: bool) -> None:
    """Over all elements of a head by key_turns, over half of them by key_transform."""
    batch = VariantBatch(
        dtype="bfloat16",
        heads=(8, 2),
        split=True,
        k_scale=0.5,
        q_lens=(1, 3, 40, 150),
        kv_lens=(200, 64, 100, 333),
        seed=2 if whole else 3,
    )
    args = arguments("rope", batch)
    assert args["frequencies"].shape[0] == (32 if whole else 16)
    check_variant("rope", ORACLES["rope"], args, batch)


@pytest.mark.parametrize("name", ["rope", "rope_interleaved"])
@pytest.mark.parametrize("heads", [(8, 2), (2, 2)])
def test_a_long_context(name: str, heads: tuple[int, int]) -> None:
    """More tiles in an item than turns are followed through; one row group to eight."""
    lens = {"q_lens": (1, 140, 20), "kv_lens": (4800, 2400, 130)}
    for head_dim, num_ctas in ((128, 1), (64, 3)):
        batch = VariantBatch(
            dtype="bfloat16", heads=heads, head_dim=head_dim, num_ctas=num_ctas, k_scale=0.5, seed=4, **lens
        )
        check_variant(name, ORACLES[name], arguments(name, batch), batch)


def eighths(r, args):
    """Every pair by an eighth of a turn a key, for ever."""
    angle = (r.kv_pos.double() * (math.pi / 4))[:, None, None]
    a, b = r.k.chunk(2, -1)
    return logits(r, k=torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1))


def test_even_turns_follow_from_those_of_few_keys() -> None:
    """A promise that is not kept shows that the functor is not asked again for each key."""
    lying = AttentionVariant(
        name="lying_evenly",
        vectorized=True,
        key_transform="return x[d];",
        key_turns="return F{} + (to_float(kv_idx) < 256.0f ? to_float(kv_idx) * 0.125f : 0.0f);",
        key_turns_evenly=True,
    )
    batch = VariantBatch(dtype="bfloat16", heads=(4, 1), q_lens=(1,), kv_lens=(700,), num_ctas=1, seed=1)
    check_variant(lying, Oracle(logits=eighths), {}, batch)


def quarter(r, args):
    """Every pair by a quarter of a turn: (a, b) becomes (-b, a)."""
    a, b = r.k.chunk(2, -1)
    return logits(r, k=torch.cat((-b, a), -1) if args["apply"] else r.k)


def test_key_turns_stands_for_key_transform() -> None:
    """A promise that is not kept shows which of the two was asked."""
    lying = AttentionVariant(
        name="lying",
        params={"apply": "bool"},
        vectorized=True,
        key_transform="return x[d];",
        key_turns="return F{} + 0.25f;",
        key_turns_if="return params.apply;",
    )
    batch = VariantBatch(dtype="bfloat16", heads=(4, 1), seed=1)
    for apply in (True, False):
        check_variant(lying, Oracle(logits=quarter), {"apply": apply}, batch)
