# SPDX-License-Identifier: Apache-2.0
"""Page tables of steps with shared prefixes, and the host's plans of what is found in them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from plan_cases import PlanCase
from shared_cases import SharedCase

from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits

_SECTIONS = ("units", "parts", "kv_len_bounds", "nodes", "node_tokens", "reports", "items")
_SEARCHED_REQUESTS = 1024  # kForestRequests of csrc/core/device_forest.h


def page_table(case: SharedCase) -> PageTable:
    """A block table whose rows have garbage behind their last page."""
    rows = case.rows()
    table = torch.full((len(rows), max([1, *map(len, rows)])), -1, dtype=torch.int32)
    for to, row in zip(table, rows, strict=True):
        to[: len(row)] = torch.tensor(row, dtype=torch.int32)
    kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32)
    return PageTable.from_block_table(table, kv_lens, page_size=case.page_size)


def host_plan(
    planner: Planner, case: SharedCase, table: PageTable, limits: torch.Tensor | None = None
) -> Plan:
    """The host's plan of the forest that a device finds."""
    requests = table.num_requests
    most = torch.full((requests,), 2**31 - 1, dtype=torch.int32) if limits is None else limits.clone()
    most[_SEARCHED_REQUESTS:] = 0
    forest = PrefixForest.of_step(
        table,
        case.plan_case.qo_indptr(),
        table.kv_lens,
        group=case.step.group,
        max_tile=case.step.tiles[1],
        limits=most,
    )
    return case.plan(planner, forest=forest)


def assert_same_bytes(plan: Plan, host: Plan) -> None:
    assert plan.header == host.header
    for name in _SECTIONS:
        np.testing.assert_array_equal(getattr(plan, name), getattr(host, name), err_msg=name)
    assert plan.tobytes() == host.tobytes()


def tree(
    groups: int,
    members: int,
    *,
    root_pages: int,
    group_pages: int,
    q_len: int = 1,
    own: int = 100,
    **step: object,
) -> SharedCase:
    """One prompt of all, a prompt of each group, requests of the groups in turn."""
    paths = tuple((0, i % groups) for i in range(groups * members))
    runs = {(0,): root_pages} | {(0, g): group_pages for g in range(groups)}
    return SharedCase(
        paths=paths,
        run_pages=runs,
        q_lens=(q_len,) * len(paths),
        own=tuple(q_len + own + i % 7 for i in range(len(paths))),
        sharing=SharingLimits(512, 8, 4096),
        step=replace(PlanCase((), (), group=4, heads=8, num_ctas=132, tiles=(16, 128)), **step),
    )


def random_case(seed: int, requests: int = 40) -> SharedCase:
    """A step in which nearly every node pays: requests of a few branches, with costs and room for all."""
    rng = np.random.default_rng(seed)
    branching, depth = int(rng.integers(1, 4)), int(rng.integers(1, 6))
    paths = tuple(
        tuple(map(int, rng.integers(0, branching, rng.integers(0, depth + 1))))
        for _ in range(rng.integers(2, requests + 1))
    )
    runs = sorted({path[: i + 1] for path in paths for i in range(len(path))})
    q_lens = tuple(map(int, rng.integers(1, rng.choice((2, 4, 9)), len(paths))))
    rare = SharingLimits(int(rng.integers(1, 8)), int(rng.integers(1, 4)), int(rng.integers(1, 60)))
    return SharedCase(
        paths=paths,
        run_pages={run: int(rng.integers(1, 30)) for run in runs},
        q_lens=q_lens,
        own=tuple(q + int(rng.integers(0, 600)) for q in q_lens),
        page_size=int(rng.choice((1, 16, 32))),
        sharing=rare if rng.integers(0, 4) == 0 else SharingLimits(512, 8, 4096),
        step=PlanCase(
            (),
            (),
            group=int(rng.choice((1, 3, 4, 8))),
            heads=int(rng.choice((1, 2, 8))),
            num_ctas=int(rng.choice((1, 3, 16, 132))),
            costs="eager",
            first_token=int(rng.choice((0, 7))),
            tiles=((1, 128), (16, 128), (16, 64))[rng.integers(0, 3)],
        ),
    )
