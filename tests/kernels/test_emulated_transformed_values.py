# SPDX-License-Identifier: Apache-2.0
"""Values that a variant transforms, on an emulated GPU: indices, layouts of fragments, missing keys."""

from __future__ import annotations

from typing import Any

import emulator_modules
import pytest
from mixed_values import MIXED_VALUES, check_mixed_values
from variant_cases import (
    ORACLES,
    VariantBatch,
    arguments,
    check_climbing_maxima,
    check_shared_prefix,
    check_variant,
)

from fi_backend import AttentionSpec, variants
from fi_backend.core import jit, kernels

# One that can multiply by wgmma, and must not.
ARCH = "sm_90a"
# Even and odd columns in two fragments, and the columns of a row shared by two warps.
CACHES: dict[str, dict[str, Any]] = {"fp8": {"kv_dtype": "float8_e4m3fn"}, "wide heads": {"head_dim": 256}}
SHIPPED = variants.CHANNEL_SCALES.name


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile them side by side."""
    needed = [({"head_dim": 64, **options}, MIXED_VALUES) for options in CACHES.values()]
    needed += [({"head_dim": 64}, variants.CHANNEL_SCALES)]
    jit.build_all(
        [
            kernels.with_variant(
                emulator_modules.attention_module(AttentionSpec(4, 2, **spec), ARCH, variant=variant), variant
            )
            for spec, variant in needed
        ]
    )


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ready", set())
    emulator_modules.install(ARCH, monkeypatch.setattr)


def batch(**options: Any) -> VariantBatch:
    """Tiles of one row and of many, requests in parts, of which none ends with a tile of keys."""
    return VariantBatch(
        **{
            "dtype": "bfloat16",
            "q_lens": (1, 3, 150),
            "kv_lens": (200, 69, 190),
            "page_size": 5,
            "v_scale": 0.25,
            **options,
        }
    )


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_values(options: dict[str, Any]) -> None:
    """With a window that begins within a tile of keys."""
    check_mixed_values(batch(split=True, options={"window_left": 77}, **options))


def test_the_shipped_variant() -> None:
    """Its tiles of 128 rows too."""
    case = batch(seed=1)
    check_variant(SHIPPED, ORACLES[SHIPPED], arguments(SHIPPED, case), case)


def test_maxima_that_climb_from_tile_to_tile() -> None:
    check_climbing_maxima(SHIPPED, num_ctas=2)


def test_a_shared_prefix() -> None:
    check_shared_prefix(SHIPPED, batch(heads=(8, 2)))
