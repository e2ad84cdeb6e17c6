# SPDX-License-Identifier: Apache-2.0
"""BatchAttention.plan(detect_prefixes=True) on the host: the plan of the forest that the page table holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError

SPEC = AttentionSpec(8, 2, 64, page_size=16)
REQUESTS, PAGES = 32, 64


def attention(spec: AttentionSpec = SPEC, *, shares: bool = True) -> BatchAttention:
    return BatchAttention(
        spec,
        max_requests=REQUESTS,
        max_tokens=64,
        max_kv_len=2000,
        num_ctas=2,
        sharing=SharingLimits.for_limits(REQUESTS, 64) if shares else None,
    )


def step() -> tuple[torch.Tensor, torch.Tensor, PageTable]:
    """Decode steps behind one prompt of 50 pages."""
    table = torch.arange(REQUESTS * PAGES, dtype=torch.int32).reshape(REQUESTS, PAGES)
    table[:, :50] = table[0, :50]
    kv_lens = torch.full((REQUESTS,), 50 * 16 + 7, dtype=torch.int32)
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    return starts, table, PageTable.from_block_table(table, kv_lens, page_size=16)


def plan_bytes(of: BatchAttention, starts: torch.Tensor, table: PageTable, **options: Any) -> bytes:
    plan = of.plan(starts, table, **options)
    assert plan is not None
    return plan.tobytes()


def test_the_plan_is_that_of_the_forest() -> None:
    starts, block_table, table = step()
    found = plan_bytes(attention(), starts, table, detect_prefixes=True)
    may = torch.full((REQUESTS,), 800, dtype=torch.int32)
    forest = PrefixForest.from_block_table(block_table, may, 16)
    assert forest.num_nodes == 1
    assert found == plan_bytes(attention(), starts, table, forest=forest)
    assert found != plan_bytes(attention(), starts, table)


def test_the_caller_may_lower_what_is_shared() -> None:
    """Pages that another request of the step is writing are not full before the step."""
    starts, block_table, table = step()
    limits = torch.tensor([0, -1, 100, 2**31 - 1] * (REQUESTS // 4), dtype=torch.int32)
    found = plan_bytes(attention(), starts, table, detect_prefixes=True, shareable=limits)
    may = torch.tensor([0, 0, 96, 800] * (REQUESTS // 4), dtype=torch.int32)
    forest = PrefixForest.from_block_table(block_table, may, 16)
    assert forest.nodes[:, 2].tolist() == [96, 800]
    assert found == plan_bytes(attention(), starts, table, forest=forest)


@pytest.mark.parametrize("fields", [{"window_left": 100}, {"batch_invariant": True}, {"alibi": True}])
def test_specs_that_never_share_plan_flat(fields: dict[str, Any]) -> None:
    spec = AttentionSpec(8, 2, 64, page_size=16, **fields)
    starts, _, table = step()
    found = plan_bytes(attention(spec), starts, table, detect_prefixes=True)
    assert found == plan_bytes(attention(spec, shares=False), starts, table)


def test_contiguous_kv_shares_nothing() -> None:
    table = PageTable.ragged(torch.arange(0, 33 * 20, 20, dtype=torch.int32))
    starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
    ragged = AttentionSpec(8, 2, 64, page_size=1)
    found = plan_bytes(attention(ragged), starts, table, detect_prefixes=True)
    assert found == plan_bytes(attention(ragged), starts, table)


def test_refusals() -> None:
    starts, block_table, table = step()
    forest = PrefixForest.from_block_table(block_table, torch.full((REQUESTS,), 800, dtype=torch.int32), 16)
    with pytest.raises(PlanError, match=r"^detect_prefixes: expected a BatchAttention with sharing="):
        attention(shares=False).plan(starts, table, detect_prefixes=True)
    with pytest.raises(PlanError, match=r"^detect_prefixes: expected False with a forest; got both"):
        attention().plan(starts, table, detect_prefixes=True, forest=forest)
    with pytest.raises(PlanError, match=r"^shareable: expected detect_prefixes=True"):
        attention().plan(starts, table, shareable=torch.zeros(2, dtype=torch.int32))
    long = PageTable(table.indices, table.row_begin, table.row_end, table.kv_lens + 1000, 16)
    with pytest.raises(PlanError, match=r"^shareable\[0\]: expected .* whose pages the row \[0, 64\)"):
        attention().plan(starts, long, detect_prefixes=True)
    with pytest.raises(PlanError, match=r"^qo_indptr: expected 3 entries"):
        attention().plan(
            starts, table, detect_prefixes=True, kv_lens_host=torch.tensor([5, 5], dtype=torch.int32)
        )
    with pytest.raises(TypeError, match=r"^qo_indptr: expected int32; got torch.int64"):
        attention().plan(starts, table, detect_prefixes=True, qo_indptr_host=starts.long())
    with pytest.raises(PlanError, match=r"^qo_indptr: expected 2 entries"):
        attention().plan(starts, table, detect_prefixes=True, kv_lens_host=torch.tensor(5, dtype=torch.int32))
    below = torch.full((REQUESTS,), -(2**31), dtype=torch.int32)
    with pytest.raises(PlanError, match=r"^kv_lens\[0\]: expected >= 0; got -2147483648"):
        attention().plan(starts, table, detect_prefixes=True, kv_lens_host=below)
