# SPDX-License-Identifier: Apache-2.0
"""What shared prefixes save: the difference to the flat plan, counted alike on the host and on the device."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from examples import share
from hypothesis import event, given
from native_planner import plan_shared_as_device
from shared_cases import SharedCase, reads, shared_cases
from shared_tables import page_table, random_case, tree

from fi_backend.core.attention import BatchAttention
from fi_backend.core.share_tally import NOTHING, READ_EVERY, Saved, ShareTally, saved_by
from fi_backend.core.spec import AttentionSpec

CPU = torch.device("cpu")


def device_counts(case: SharedCase, start: tuple[int, int, int] = (0, 0, 0)) -> Saved:
    tally = torch.tensor(start, dtype=torch.int64)
    plan_shared_as_device(case.planner(), case.plan_case.qo_indptr(), page_table(case), "128_3", tally=tally)
    return Saved(*tally.tolist())


@share(100)
@given(shared_cases())
def test_saved_is_the_difference_to_the_flat_plan(case: SharedCase) -> None:
    planner = case.planner()
    composed, flat = case.plan(planner), case.plan_case.plan(planner)
    event(f"{composed.num_nodes} nodes")
    assert composed.num_nodes == composed.header["num_nodes"]
    assert saved_by(flat) == NOTHING
    # Only requests of several tiles read keys twice, and these are never composed.
    assert saved_by(composed).tokens == reads(flat) - reads(composed)
    assert saved_by(composed)[:2] == ((1, composed.num_nodes) if composed.num_nodes else (0, 0))


def test_the_device_counts_what_the_host_counts() -> None:
    counted = 0
    for seed in range(30):
        case = random_case(seed)
        expected = saved_by(case.plan())
        assert device_counts(case) == expected
        counted += expected.plans
    assert counted > 15


def test_counts_add_up() -> None:
    case = tree(4, 8, root_pages=50, group_pages=20)
    once = saved_by(case.plan())
    # Thirty-two requests of one token and four heads a KV head: one tile of 128 rows, four of 32.
    assert once == Saved(1, 5, (31 * 50 + 4 * 7 * 20) * 16)
    assert device_counts(case, (2, 3, 4)) == Saved(3, 8, 4 + once.tokens)
    tally = ShareTally(CPU)
    tally.add(case.plan())
    tally.add(case.plan())
    assert tally.take() == Saved(2, 10, 2 * once.tokens)
    assert tally.take() == NOTHING


def test_without_sharing_nothing_is_counted() -> None:
    case = SharedCase(paths=((),) * 4, run_pages={}, q_lens=(1,) * 4, own=(100,) * 4)
    assert device_counts(case) == NOTHING
    flat = BatchAttention(AttentionSpec(2, 1, 64), max_requests=1, max_tokens=1, max_kv_len=1)
    assert flat.tally is None


class _Event:
    """Of a copy from a GPU: through when the test says so."""

    def __init__(self) -> None:
        self.recorded, self.through = 0, False

    def record(self, stream: object) -> None:
        self.recorded += 1
        self.through = False

    def query(self) -> bool:
        return self.through


def test_a_device_is_read_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.now)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **_: zeros(*size, dtype=torch.int64))
    tally = ShareTally(torch.device("cuda", 0))
    event, device = tally._landed, tally.tensor
    assert device is not None
    for _ in range(READ_EVERY - 1):
        device += torch.tensor([1, 2, 100])
        assert tally.take() == NOTHING
    assert event.recorded == 0
    capturing.now = True
    tally.take()
    assert event.recorded == 0, "a graph would copy in every replay"
    capturing.now = False
    device += torch.tensor([1, 2, 100])
    assert tally.take() == NOTHING
    assert event.recorded == 1
    device += torch.tensor([1, 2, 100])
    assert tally.take() == NOTHING, "the copy is not through"
    event.through = True
    assert tally.take() == Saved(16, 32, 1600)
    for _ in range(READ_EVERY - 2):
        assert tally.take() == NOTHING
    event.through = True
    assert tally.take() == Saved(1, 2, 100)
