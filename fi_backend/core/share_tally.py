# SPDX-License-Identifier: Apache-2.0
"""Counts what shared prefixes save, also where a plan is made on a GPU and nothing waits for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fi_backend.core.plan import PREFIX, SUFFIX, Plan

# Plans between two reads from the device. A read costs the host some 10 us.
READ_EVERY = 16


class Saved(NamedTuple):
    """Sums over plans.

    plans: those with one shared prefix or more. nodes: their prefix nodes, each read once for all its
    members. tokens: KV tokens that were not read again, for one KV head of one layer.
    """

    plans: int
    nodes: int
    tokens: int


NOTHING = Saved(0, 0, 0)


def saved_by(plan: Plan) -> Saved:
    """Return what the shared prefixes of one plan save beside the flat plan of the same step."""
    if not (nodes := plan.num_nodes):
        return NOTHING
    items = plan.items
    flags = items["flags"]
    own, shared = items[flags & SUFFIX != 0], items[flags & PREFIX != 0]
    # A composed request reads only what lies behind its nodes, whose items read the rest once.
    once = (shared["kv_end"] - shared["kv_begin"]).sum(dtype=np.int64)
    return Saved(1, nodes, int(own["kv_begin"].sum(dtype=np.int64) - once))


class ShareTally:
    """What the plans of one BatchAttention have saved.

    On CUDA the planner adds to `tensor` (int64 [3]: plans, nodes, tokens) on the device. Every READ_EVERY
    plans take() starts a copy of it to pinned memory, and a later take() finds it there: the host never
    waits, and what it knows is up to 2 * READ_EVERY plans old. On a CPU `tensor` is None and all is known.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor: torch.Tensor | None = None
        self._unread = NOTHING
        if device.type == "cuda":
            self.tensor = torch.zeros(3, dtype=torch.int64, device=device)
            self._landing = torch.zeros(3, dtype=torch.int64, device="cpu", pin_memory=True)
            with torch.cuda.device(device):
                self._landed = torch.cuda.Event()
            self._under_way = False
            self._read = NOTHING
            self._plans = 0

    def add(self, plan: Plan) -> None:
        """Count a plan that the host made."""
        if plan.num_nodes:
            self._unread = Saved(*map(sum, zip(self._unread, saved_by(plan), strict=True)))

    def take(self) -> Saved:
        """Return what has become known since the last call, of which there is one a plan."""
        if self.tensor is not None and not torch.cuda.is_current_stream_capturing():
            self._read_device(self.tensor)
        taken, self._unread = self._unread, NOTHING
        return taken

    def _read_device(self, tensor: torch.Tensor) -> None:
        self._plans += 1
        if self._under_way and self._landed.query():
            self._under_way = False
            found = Saved(*self._landing.tolist())
            new = (a - b for a, b in zip(found, self._read, strict=True))
            self._unread = Saved(*map(sum, zip(self._unread, new, strict=True)))
            self._read = found
        if not self._under_way and self._plans >= READ_EVERY:
            self._landing.copy_(tensor, non_blocking=True)
            self._landed.record(torch.cuda.current_stream(tensor.device))
            self._under_way, self._plans = True, 0
