# SPDX-License-Identifier: Apache-2.0
"""What holds of every composed plan: rows and keys, reports and arrivals, flags."""

from __future__ import annotations

from collections import Counter

import numpy as np
from oracle import visible
from plan_cases import PlanCase

from fi_backend.core.plan import LAST_CHUNK, PREFIX, SUFFIX, Plan

State = tuple[int, int, int, int]  # query token, head of the group, KV begin, KV end


def rows_of(case: PlanCase, plan: Plan, item: np.void) -> list[tuple[int, int]]:
    """(query token, head of the group) of each packed row of an item."""
    packed = np.arange(item["q_begin"], item["q_begin"] + item["q_rows"])
    tokens, heads = np.divmod(packed, case.group)
    if item["flags"] & PREFIX:
        node = plan.nodes[item["request"]]
        assert (tokens < node["num_tokens"]).all()
        tokens = plan.node_tokens[node["tokens_begin"] + tokens]
    else:
        tokens = tokens + case.qo_indptr().numpy()[item["request"]]
    return list(zip(tokens.tolist(), heads.tolist(), strict=True))


def states_of(case: PlanCase, plan: Plan) -> dict[int, State]:
    """What each row of the partial states holds."""
    states: dict[int, State] = {}
    for item in plan.items:
        if item["partial"] < 0:
            continue
        for i, (token, head) in enumerate(rows_of(case, plan, item)):
            row = int(item["partial"]) + i
            assert row not in states, "two items write one row"
            states[row] = token, head, int(item["kv_begin"]), int(item["kv_end"])
    return states


def covered(case: PlanCase, plan: Plan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """KV ranges of each (query token, head of the group) in the order in which they are merged."""
    starts = case.qo_indptr().numpy()
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for item in plan.items:
        if item["partial"] < 0:
            for row in rows_of(case, plan, item):
                assert row not in ranges
                ranges[row] = [(int(item["kv_begin"]), int(item["kv_end"]))]
    states = states_of(case, plan)
    used: set[int] = set()
    for unit in plan.units:
        parts = plan.parts[unit["parts_begin"] : unit["parts_end"]]
        for i in range(unit["q_rows"]):
            token, head = divmod(int(unit["q_begin"]) + i, case.group)
            row = int(starts[unit["request"]]) + token, head
            assert row not in ranges
            found = [states[int(part) + i] for part in parts]
            assert all(state[:2] == row for state in found), "a part holds the state of another row"
            ranges[row] = [state[2:] for state in found]
            used |= {int(part) + i for part in parts}
    assert used == states.keys() == set(range(plan.header["num_partial_rows"]))
    return ranges


def check_coverage(case: PlanCase, plan: Plan) -> None:
    ranges = covered(case, plan)
    start = case.first_token
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        seen = visible(q_len, kv_len, case.causal).sum(dim=1)  # no window: keys from 0 on
        for token in range(q_len):
            for head in range(case.group):
                chunks = ranges.pop((start + token, head))
                ends = [0, *(end for _, end in chunks)]
                assert [begin for begin, _ in chunks] == ends[:-1], "a key is read twice, or never"
                assert ends[-1] >= seen[token]
        start += q_len
    assert not ranges


def check_reports(case: PlanCase, plan: Plan) -> None:
    """Arrivals are counted as items report them, and a node tile reports to the units of its rows."""
    arrivals: Counter[int] = Counter()
    starts = case.qo_indptr().numpy()
    unit_of = {int(unit["request"]): i for i, unit in enumerate(plan.units) if unit["token"] >= 0}
    for item in plan.items:
        if not item["flags"] & PREFIX:
            arrivals.update([int(item["unit"])] if item["unit"] >= 0 else [])
            continue
        count = plan.reports[item["unit"]]
        units = plan.reports[item["unit"] + 1 : item["unit"] + 1 + count].tolist()
        tokens = np.array([token for token, _ in rows_of(case, plan, item)])
        requests = np.unique(np.searchsorted(starts, tokens, side="right") - 1)
        assert units == [unit_of[int(r)] for r in requests]
        arrivals.update(units)
    assert arrivals == {i: int(unit["num_items"]) for i, unit in enumerate(plan.units)}


def check_flags(case: PlanCase, plan: Plan) -> None:
    composed = {int(unit["request"]): unit for unit in plan.units if unit["token"] >= 0}
    starts = case.qo_indptr().numpy()
    own: dict[int, list[np.void]] = {r: [] for r in composed}
    ends: dict[int, int] = {}
    for item in plan.items:
        if item["flags"] & PREFIX:
            assert item["flags"] == PREFIX
            assert item["kv_begin"] < item["kv_end"]
            ends[int(item["request"])] = max(ends.get(int(item["request"]), 0), int(item["kv_end"]))
        elif item["request"] in own:
            own[int(item["request"])].append(item)
        else:
            assert not item["flags"] & SUFFIX
    for request, items in own.items():
        items.sort(key=lambda item: int(item["kv_begin"]))
        flags = [0] * len(items)
        flags[0] |= SUFFIX
        flags[-1] |= LAST_CHUNK
        assert [item["flags"] for item in items] == flags
        assert all(item["partial"] >= 0 and item["unit"] >= 0 for item in items)
        assert composed[request]["token"] == starts[request]
        assert composed[request]["q_rows"] == case.q_lens[request] * case.group
    assert ends == dict(enumerate(plan.nodes["kv_end"].tolist()))
    for node in plan.nodes:
        tokens = plan.node_tokens[node["tokens_begin"] : node["tokens_begin"] + node["num_tokens"]]
        members = np.unique(np.searchsorted(starts, tokens, side="right") - 1)
        assert len(members) >= 2
        assert node["request"] == members[0]
