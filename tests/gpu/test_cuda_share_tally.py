# SPDX-License-Identifier: Apache-2.0
"""What shared prefixes save, counted on a GPU by the planner and read back without waiting."""

from __future__ import annotations

import pytest
import torch
from shared_tables import host_plan, page_table, random_case, tree
from test_cuda_forest import on_device

from fi_backend.core.attention import BatchAttention
from fi_backend.core.share_tally import NOTHING, READ_EVERY, Saved, saved_by
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

pytestmark = pytest.mark.gpu


def test_the_planner_counts_what_the_host_counts() -> None:
    tally = torch.zeros(3, dtype=torch.int64, device="cuda")
    expected = NOTHING
    for seed in range(40):
        case = random_case(seed, requests=200)
        planner, table = case.planner(), page_table(case)
        expected = Saved(*map(sum, zip(expected, saved_by(host_plan(planner, case, table)), strict=True)))
        there = on_device(table)
        buffer = torch.empty(planner.layout.total, dtype=torch.uint8, device="cuda")
        planner.plan_on_device(case.plan_case.qo_indptr().cuda(), there.kv_lens, buffer, there, tally=tally)
    assert Saved(*tally.tolist()) == expected
    assert expected.plans > 20


def test_counts_come_back_while_steps_go_on() -> None:
    # A prompt of all 32 requests and those of four groups, so long that both levels pay by far.
    case = tree(4, 8, root_pages=1000, group_pages=400)
    requests = len(case.paths)
    attention = BatchAttention(
        AttentionSpec(32, 8, 128, page_size=16),
        max_requests=requests,
        max_tokens=requests,
        max_kv_len=32768,
        device="cuda",
        sharing=SharingLimits(requests, 3, requests),
    )
    assert attention.tally is not None
    expected = saved_by(host_plan(attention.planner, case, page_table(case)))
    assert expected.nodes == 5
    table = on_device(page_table(case))
    qo_indptr = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    taken = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2 * READ_EVERY):
            attention.plan(qo_indptr, table, detect_prefixes=True)
            taken.append(attention.tally.take())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    taken.append(attention.tally.take())
    plans, nodes, tokens = (sum(values) for values in zip(*taken, strict=True))
    assert READ_EVERY <= plans <= 2 * READ_EVERY
    assert (nodes, tokens) == (plans * expected.nodes, plans * expected.tokens)
