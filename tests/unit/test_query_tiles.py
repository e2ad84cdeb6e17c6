# SPDX-License-Identifier: Apache-2.0
"""The heights of query tiles that kernels have: a plan with others would be read wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import query_tiles
from fi_backend.core.variant import AttentionVariant

TRANSFORMS = (
    AttentionVariant(name="keys", key_transform="return x[d];"),
    AttentionVariant(name="values", value_transform="return x[d];"),
)
COLD = AttentionVariant(name="cold", logits_transform="return 0.5 * logit;")


@pytest.mark.parametrize(
    ("arch", "heads", "tallest"),
    [
        ("sm_80", {"head_dim": 128}, 128),
        ("sm_80", {"head_dim": 192, "head_dim_v": 128}, 64),
        ("sm_120a", {"head_dim": 256}, 64),
        ("sm_90a", {"head_dim": 128, "kv_dtype": "float8_e5m2"}, 128),
        ("sm_90a", {"head_dim": 192, "head_dim_v": 128}, 128),
        ("sm_90a", {"head_dim": 192, "head_dim_v": 128, "batch_invariant": True}, 128),
        ("sm_90a", {"head_dim": 192}, 128),
        ("sm_90a", {"head_dim": 256}, 128),
        ("sm_90a", {"head_dim": 256, "kv_dtype": "float8_e4m3fn"}, 64),
        ("sm_90a", {"head_dim": 256, "batch_invariant": True}, 64),
    ],
)
def test_tallest_tile_of_each_kernel(arch: str, heads: dict[str, Any], tallest: int) -> None:
    spec = AttentionSpec(8, 2, **heads)
    assert query_tiles(spec, "cuda", arch=arch) == (16, tallest)
    assert query_tiles(spec, "cuda", COLD, arch=arch) == (16, tallest)
    assert query_tiles(spec, "cpu") == (1, 128)


@pytest.mark.parametrize("variant", TRANSFORMS, ids=lambda variant: variant.name)
@pytest.mark.parametrize(("heads", "tallest"), [((128, 128), 128), ((192, 128), 128), ((256, 256), 64)])
def test_what_is_transformed_is_no_operand_of_wgmma(
    variant: AttentionVariant, heads: tuple[int, int], tallest: int
) -> None:
    spec = AttentionSpec(8, 2, heads[0], head_dim_v=heads[1])
    assert query_tiles(spec, "cuda", variant, arch="sm_90a") == (16, tallest)
