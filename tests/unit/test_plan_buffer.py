# SPDX-License-Identifier: Apache-2.0
"""The ring of host memory behind a plan on a GPU, with events that need none."""

from __future__ import annotations

import pytest
import torch

from fi_backend.core.plan_buffer import PlanBuffer
from fi_backend.errors import PlanError


class Event:
    """A copy that is through once somebody waits for it."""

    def __init__(self) -> None:
        self.recorded, self.waited = 0, 0

    def record(self, _: object) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        self.waited = self.recorded


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> PlanBuffer:
    """Four slots, as on a GPU, on a stream that is not being captured."""
    buffer = PlanBuffer(8, torch.device("cpu"))
    buffer._slots = [torch.zeros(8, dtype=torch.uint8) for _ in range(4)]
    buffer._events = [Event() for _ in range(4)]  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return buffer


def test_a_slot_is_written_again_after_its_copy_alone(ring: PlanBuffer) -> None:
    address, slots = ring.tensor.data_ptr(), set()
    for number in range(11):
        slot = ring.host()
        event = ring._events[number % 4]
        assert event.waited == event.recorded, "handed out while it was being copied"  # type: ignore[attr-defined]
        slot.fill_(number)
        slots.add(slot.data_ptr())
        ring.upload()
        assert ring.tensor.tolist() == [number] * 8
        assert ring.tensor.data_ptr() == address
    assert len(slots) == 4


def test_a_capture_refuses_a_plan_of_the_host(ring: PlanBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would hold the slot, and copy at each replay whatever a later plan left there."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PlanError, match=r"^qo_indptr_host, kv_lens_host: expected None while a CUDA graph"):
        ring.host()


def test_on_a_cpu_the_plan_is_written_where_it_is_read() -> None:
    buffer = PlanBuffer(8, torch.device("cpu"))
    for _ in range(3):
        assert buffer.host() is buffer.tensor
        buffer.upload()
