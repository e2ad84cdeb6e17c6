# SPDX-License-Identifier: Apache-2.0
"""Values that a variant transforms, on an emulated GPU: indices, layouts of fragments, missing keys."""

from __future__ import annotations

from typing import Any

import emulator_modules
import pytest
import torch
from mixed_values import MIXED_VALUES, check_mixed_values
from variant_cases import ORACLES, VariantBatch, arguments, check_shared_prefix, check_variant

from fi_backend import AttentionSpec, BatchAttention, PageTable, variants
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
    """A warp that transforms its own keys weighs them by the maximum so far, unless they rise by too much."""
    levels = torch.tensor([0, 2, 3, 16, 15, 64, 0, 64, 80, 250]).repeat_interleave(64)  # logits of keys
    spec = AttentionSpec(4, 2, 64, scale=1.0)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, 4, 64), torch.zeros(len(levels), 2, 64)
    q[..., 0], q[..., 1:] = 1, torch.randn(1, 4, 63, generator=generator) * 0.125
    k[..., 0], k[..., 1:] = levels[:, None], torch.randn(len(levels), 2, 63, generator=generator)
    v = torch.randn(len(levels), 2, 64, generator=generator)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    ones = {name: torch.ones(2, 64) for name in ("key_scale", "value_scale")}
    for length in (64, 200, 320, 448, len(levels)):
        attention = BatchAttention(
            spec, max_requests=1, max_tokens=1, max_kv_len=length, num_ctas=2, variant=SHIPPED
        )
        starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        table = PageTable.ragged(torch.tensor([0, length], dtype=torch.int32))
        attention.plan(starts, table, qo_indptr_host=starts, kv_lens_host=lens)
        lse = torch.empty(1, 4)
        out = attention.run(q, k[:length], v[:length], lse=lse, variant_args=ones)
        keys, values = (x[:length].double().repeat_interleave(2, dim=1) for x in (k, v))
        logits = torch.einsum("thd,khd->thk", q.double(), keys)
        exact = torch.einsum("thk,khd->thd", logits.softmax(-1), values)
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), logits.logsumexp(-1), atol=1e-3, rtol=1e-5)


def test_a_shared_prefix() -> None:
    check_shared_prefix(SHIPPED, batch(heads=(8, 2)))
