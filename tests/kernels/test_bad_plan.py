# SPDX-License-Identifier: Apache-2.0
"""Bad input to plan() and to the constructor: a typed error, and the plan before stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numeric import assert_bitwise_equal
from test_bad_input import SPEC, Step, int32

from fi_backend.core.attention import BatchAttention
from fi_backend.core.block_sparse import BlockSparse
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError, UnsupportedError

BLOCKS = int32(3, 0, 7, 1, 5, 2, 6, 4, 0, 0, 0, 0).view(2, 6)
TABLE = PageTable.from_block_table(BLOCKS, int32(90, 20), page_size=16)
STARTS = int32(0, 1, 5)
BAD_PLANS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "starts dtype": ({"qo_indptr": STARTS.long()}, TypeError, r"^qo_indptr: .*torch\.int64"),
    "starts count": ({"qo_indptr": int32(0, 5)}, PlanError, r"^qo_indptr: expected 3 .*got shape \(2,\)"),
    "starts device": ({"qo_indptr": STARTS.to("meta")}, PlanError, r"^qo_indptr: .*device cpu; got meta"),
    "decreasing": ({"qo_indptr": int32(0, 5, 1)}, PlanError, r"^qo_indptr: .*non-decreasing.*got 5 then 1"),
    "tokens": ({"qo_indptr": int32(0, 1, 18)}, PlanError, r"^qo_indptr: .*max_tokens = 16 .*got 18"),
    "host dtype": ({"qo_indptr_host": STARTS.long()}, TypeError, r"^qo_indptr: expected int32; got int64"),
    "bound dtype": ({"kv_lens_host": torch.ones(2)}, TypeError, r"^kv_lens: .*; got float32"),
    "bound count": ({"kv_lens_host": int32(90)}, PlanError, r"^qo_indptr: expected 2 entries.*got 3"),
    "bound too long": ({"kv_lens_host": int32(90, 101)}, PlanError, r"^kv_lens\[1\]: .*= 100; got 101"),
    "bound negative": ({"kv_lens_host": int32(-5, 20)}, PlanError, r"^kv_lens\[0\]: expected >= 0; got -5"),
    "page size": (
        {"page_table": PageTable.from_block_table(BLOCKS, TABLE.kv_lens, page_size=8)},
        PlanError, r"^page_table: expected page_size 16, the spec's; got 8",
    ),
    "mask": ({"custom_mask": torch.ones(170).bool()}, PlanError, r"^custom_mask: expected None"),
    "blocks": (
        {"page_table": BlockSparse.from_mask(torch.ones(5, 32).bool(), block_rows=5, block_cols=16)},
        PlanError, r"^page_table: .*causal=False",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_a_plan_that_fails_leaves_the_one_before(change: Any, kind: type[Exception], message: str) -> None:
    step = Step()
    step.attn.run(**step.arguments)
    first = step.arguments["out"].clone()
    before = step.attn._plan_buffer.tensor.clone()
    with pytest.raises(kind, match=message):
        step.attn.plan(**{"qo_indptr": STARTS, "page_table": TABLE} | change)
    assert_bitwise_equal("plan", step.attn._plan_buffer.tensor, before)
    step.attn.run(**step.arguments)
    assert_bitwise_equal("out", step.arguments["out"], first)


MASK_SPEC = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, custom_mask=True)
GOOD_MASKS = [torch.ones(1, 90, dtype=torch.bool), torch.ones(4, 20, dtype=torch.bool)]


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (None, PlanError, r"^custom_mask: expected a mask"),
        (torch.ones(169, dtype=torch.bool), ValueError, r"^custom_mask: expected 170 elements.*got 169"),
        (torch.ones(170), TypeError, r"^custom_mask: expected bool; got torch\.float32"),
        (GOOD_MASKS[:1], ValueError, r"^custom_mask: expected 2 matrices.*got 1"),
        (
            GOOD_MASKS[::-1],
            ValueError,
            r"^custom_mask\[0\]: expected bool \(1, 90\); got torch\.bool \(4, 20\)",
        ),
        ([GOOD_MASKS[0], GOOD_MASKS[1].int()], (ValueError, TypeError), r"^custom_mask\[1\]: expected bool"),
    ],
)
def test_masks_that_do_not_fit_the_batch(mask: Any, kind: type[Exception], message: str) -> None:
    attn = BatchAttention(MASK_SPEC, max_requests=4, max_tokens=16, max_kv_len=100)
    attn.plan(STARTS, TABLE, custom_mask=GOOD_MASKS)
    before = attn._plan_buffer.tensor.clone()
    with pytest.raises(kind, match=message):
        attn.plan(STARTS, TABLE, custom_mask=mask)
    assert_bitwise_equal("plan", attn._plan_buffer.tensor, before)


def test_construction_names_what_it_cannot_do() -> None:
    limits = {"max_requests": 4, "max_tokens": 16, "max_kv_len": 100}
    with pytest.raises(UnsupportedError, match=r"^device: .*cpu.*; got 'meta'"):
        BatchAttention(SPEC, **limits, device="meta")
    with pytest.raises(ValueError, match=r"^max_tokens: expected 1 .*got 0"):
        BatchAttention(SPEC, **limits | {"max_tokens": 0})
    size = BatchAttention(SPEC, **limits).workspace_size()
    good = torch.empty(size + 64, dtype=torch.uint8)
    for workspace, kind, message in [
        (good[: size - 1], ValueError, rf"^workspace: expected .* {size} bytes.*got {size - 1}"),
        (
            good.view(torch.int8)[:size],
            TypeError,
            r"^workspace: expected a contiguous uint8 vector; got torch\.int8",
        ),
        (good[None], TypeError, r"^workspace: expected a contiguous uint8 vector"),
        (good[1 : size + 1], ValueError, r"^workspace: expected a 64-byte aligned start"),
        (good[:size].to("meta"), ValueError, r"^workspace: expected device cpu; got meta"),
    ]:
        with pytest.raises(kind, match=message):
            BatchAttention(SPEC, **limits, workspace=workspace)
