# SPDX-License-Identifier: Apache-2.0
"""BatchAttention at the edges of its arguments: what is no tensor, empty tables, windows of 31 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def attention(**options: Any) -> BatchAttention:
    spec = AttentionSpec(2, 1, 16, dtype="float32", **options)
    return BatchAttention(spec, max_requests=4, max_tokens=32, max_kv_len=64, num_ctas=1)


TABLE = PageTable.ragged(int32(0, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qo_indptr": [0, 1]}, "^qo_indptr: expected a torch tensor; got list"),
        ({"page_table": int32(8)}, "^page_table: expected a PageTable or a BlockSparse; got Tensor"),
        ({"qo_indptr_host": np.array([0, 1])}, "^qo_indptr_host: expected a torch tensor; got ndarray"),
        ({"kv_lens_host": [8]}, "^kv_lens_host: expected a torch tensor; got list"),
    ],
)
def test_what_is_no_tensor_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attention().plan(**{"qo_indptr": int32(0, 1), "page_table": TABLE} | change)


@pytest.mark.parametrize(
    ("starts", "lens", "mask", "kind", "message"),
    [
        (int32(3, 1), None, torch.ones(8).bool(), ValueError, r"^qo_indptr: .*>= 0; got \[-2\]"),
        (int32(0, 1), int32(-8), torch.ones(8).bool(), ValueError, r"^kv_lens: .*>= 0; got \[-8\]"),
        (int32(0, 1), int32(8, 8), torch.ones(8).bool(), ValueError, "^kv_lens: expected 1 entries.*got 2"),
        (int32(0, 1), None, [[True] * 8], TypeError, r"^custom_mask\[0\]: expected bool .*got list"),
    ],
)
def test_lengths_are_checked_before_a_mask_is_cut(
    starts: torch.Tensor, lens: Any, mask: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        attention(custom_mask=True).plan(starts, TABLE, kv_lens_host=lens, custom_mask=mask)


def test_the_plan_that_a_caller_gets_cannot_change_the_one_that_runs() -> None:
    plan = attention().plan(int32(0, 1), TABLE)
    with pytest.raises(ValueError, match="read-only"):
        plan.buffer[:] = 0


def test_requests_without_a_column_in_the_table() -> None:
    attn = attention(page_size=4)
    empty = torch.empty(3, 0, dtype=torch.int32)
    attn.plan(int32(0, 1, 2, 3), PageTable.from_block_table(empty, int32(0, 0, 0), page_size=4))
    cache, out = torch.ones(2, 4, 1, 16), torch.full((3, 2, 16), torch.nan)
    assert torch.equal(attn.run(torch.ones(3, 2, 16), cache, cache, out=out), torch.zeros(3, 2, 16))


@pytest.mark.parametrize("causal", [True, False])
def test_the_widest_window_hides_nothing_from_rows_before_the_first_key(causal: bool) -> None:
    """With more queries than keys, a negative position minus the window wrapped: such rows saw no key."""
    q, k, v = (
        torch.randn(n, h, 16, generator=torch.Generator().manual_seed(n))
        for n, h in ((20, 2), (8, 1), (8, 1))
    )
    results = []
    for window in (-1, 2**31 - 1):
        attn = attention(causal=causal, window_left=window)
        attn.plan(int32(0, 20), TABLE)
        lse = torch.full((20, 2), torch.nan)
        results.append((attn.run(q, k, v, lse=lse), lse))
    (off, off_lse), (wide, wide_lse) = results
    assert torch.equal(wide, off)
    assert torch.equal(wide_lse, off_lse)
    assert torch.isfinite(off_lse).all(1).sum() == (8 if causal else 20)
