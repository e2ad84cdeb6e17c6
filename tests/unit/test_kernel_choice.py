# SPDX-License-Identifier: Apache-2.0
"""Which kernel runs a layer, why not another one, and the query tiles that plans may have for it."""

from __future__ import annotations

from typing import Any

import pytest

from fi_backend import BatchAttention
from fi_backend.core import kernels
from fi_backend.core.kernel_choice import candidates, choose
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import query_tiles
from fi_backend.core.variant import AttentionVariant

KEYS = AttentionVariant(name="keys", key_transform="return x;")
VALUES = AttentionVariant(name="values", value_transform="return x;")
COLD = AttentionVariant(name="cold", logits_transform="return 0.5f * logit;")
FP8 = {"kv_dtype": "float8_e4m3fn"}


@pytest.mark.parametrize(
    ("arch", "heads", "kernel", "tallest"),
    [
        ("sm_80", {"head_dim": 128}, "mma", 128),
        ("sm_80", {"head_dim": 192, "head_dim_v": 128}, "mma", 64),
        ("sm_120a", {"head_dim": 256}, "mma", 64),
        ("sm_100a", {"head_dim": 64} | FP8, "mma", 128),
        ("sm_90a", {"head_dim": 128}, "wgmma", 128),
        ("sm_90a", {"head_dim": 128} | FP8, "wgmma", 128),
        ("sm_90a", {"head_dim": 128, "batch_invariant": True}, "wgmma", 128),
        ("sm_90a", {"head_dim": 64, "dtype": "float16", "batch_invariant": True}, "wgmma", 128),
        ("sm_90a", {"head_dim": 128, "batch_invariant": True} | FP8, "mma", 128),
        ("sm_90a", {"head_dim": 192, "head_dim_v": 128}, "wgmma", 128),
        ("sm_90a", {"head_dim": 192, "head_dim_v": 128} | FP8, "mma", 128),
        ("sm_90a", {"head_dim": 192, "head_dim_v": 128, "batch_invariant": True}, "mma", 128),
        ("sm_90a", {"head_dim": 192}, "wgmma", 128),
        ("sm_90a", {"head_dim": 256}, "wgmma", 128),
        ("sm_90a", {"head_dim": 256} | FP8, "mma", 64),
        ("sm_90a", {"head_dim": 256, "batch_invariant": True}, "mma", 64),
        ("cpu", {"head_dim": 256}, "cpu", 128),
    ],
)
def test_best_kernel_and_its_tiles(arch: str, heads: dict[str, Any], kernel: str, tallest: int) -> None:
    spec = AttentionSpec(8, 2, **heads)
    for variant in (None, COLD):
        found = choose(spec, arch, variant)
        assert (found.name, found.tiles[1]) == (kernel, tallest)
        device = "cpu" if arch == "cpu" else "cuda"
        assert query_tiles(spec, device, variant, arch=arch) == found.tiles


@pytest.mark.parametrize("variant", [KEYS, VALUES])
@pytest.mark.parametrize(("heads", "tallest"), [((128, 128), 128), ((192, 128), 128), ((256, 256), 64)])
def test_transformed_tiles_are_no_operand_of_wgmma(
    variant: AttentionVariant, heads: tuple[int, int], tallest: int
) -> None:
    spec = AttentionSpec(8, 2, heads[0], head_dim_v=heads[1])
    found = choose(spec, "sm_90a", variant)
    assert (found.name, found.tiles) == ("mma", (16, tallest))


def test_candidates_stand_in_order_with_their_reasons() -> None:
    spec = AttentionSpec(8, 2, 256, batch_invariant=True)
    found = candidates(spec, "sm_90a")
    assert [each.kernel.name for each in found] == ["wgmma", "mma"]
    assert [each.kernel.cost for each in found] == sorted(each.kernel.cost for each in found)
    assert "batch_invariant" in str(found[0].reason)
    assert "256, 256" in str(found[0].reason)
    fp8 = AttentionSpec(8, 2, 128, batch_invariant=True, **FP8)
    assert "order" in str(candidates(fp8, "sm_90a")[0].reason)
    assert found[1].reason is None
    assert "sm_90a" in str(candidates(spec, "sm_80")[0].reason)
    assert "values" in str(candidates(AttentionSpec(8, 2, 64), "sm_90a", VALUES)[0].reason)


def test_a_kernel_is_named_instead() -> None:
    spec = AttentionSpec(8, 2, 256)
    assert choose(spec, "sm_90a", name="mma").tiles == (16, 64)
    best, other = (kernels.cuda_attention_module(spec, "sm_90a", None, name) for name in (None, "mma"))
    assert best == kernels.cuda_attention_module(spec, "sm_90a", None, "wgmma")
    assert best.name != other.name
    assert ("FI_WGMMA", "1") in best.defines
    assert ("FI_WGMMA", "0") in other.defines
    with pytest.raises(ValueError, match="kernel: 'wgmma' needs the target sm_90a; got sm_80"):
        choose(spec, "sm_80", name="wgmma")
    with pytest.raises(ValueError, match="kernel: expected one of wgmma, mma on sm_90a; got 'cpu'"):
        choose(spec, "sm_90a", name="cpu")
    with pytest.raises(ValueError, match="kernel: expected one of cpu on cpu; got 'mma'"):
        BatchAttention(spec, max_requests=1, max_tokens=1, max_kv_len=16, kernel="mma")
