# SPDX-License-Identifier: Apache-2.0
"""Where a plan is written and from where kernels read it: one buffer on a CPU, a pinned ring on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core.faults import faults_at, raise_faults
from fi_backend.core.plan import PlanLayout
from fi_backend.errors import PlanError

_SLOTS = 4


class PlanBuffer:
    """The plan buffer of one BatchAttention; `tensor` (uint8, on the device) never moves.

    size: bytes. On CUDA the host writes slots of pinned memory in turn and copies them to `tensor`
    asynchronously on the current stream. A slot is written again once its copy is through, which an event
    tells, so that any number of plans may be in flight.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        self._slots = [self.tensor]
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._slots = [
                torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(_SLOTS)
            ]
            with torch.cuda.device(device):
                self._events = [torch.cuda.Event() for _ in range(_SLOTS)]
        self._next = 0

    def host(self) -> Tensor:
        """Return the host memory for the next plan, uint8 [size]; waits if all slots are being copied.

        Raises PlanError while a graph is being captured: its replays would copy the slot's later contents.
        """
        if self._events:
            if torch.cuda.is_current_stream_capturing():
                raise PlanError(
                    "qo_indptr_host, kv_lens_host: expected None while a CUDA graph is being captured; got "
                    "lengths of the host. Plan before the capture and before each replay, or leave both out."
                )
            self._events[self._next].synchronize()
        return self._slots[self._next]

    def upload(self) -> None:
        """Make what host() returned the plan of all later launches on the current stream."""
        if not self._events:
            return
        self.tensor.copy_(self._slots[self._next], non_blocking=True)
        self._events[self._next].record(torch.cuda.current_stream(self.tensor.device))
        self._next = (self._next + 1) % len(self._slots)

    def raise_faults(self, layout: PlanLayout) -> None:
        """Wait for the launches and raise ValueError for what they met in data that only the device sees."""
        if self.tensor.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        at = faults_at(layout)
        raise_faults(int(self.tensor[at : at + 4].view(torch.int32).item()))
