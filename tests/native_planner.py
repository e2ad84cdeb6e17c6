# SPDX-License-Identifier: Apache-2.0
"""The device planner's source on emulated thread blocks, over memory that holds garbage."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from fi_backend.core import jit
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.planner import Planner

GUARD = 4096
SOURCE = Path(__file__).parent / "unit" / "native" / "device_plan_host.cc"


@cache
def module() -> Any:
    spec = jit.ModuleSpec("device_plan_host", ("core/capacity.cc", str(SOURCE)))
    return jit.load(spec)


class _Memory:
    """A workspace and a plan buffer of the sizes that a planner asks for, and garbage behind both."""

    def __init__(self, planner: Planner, seed: int) -> None:
        self._words, self._size = module().workspace_words(planner.config), planner.layout.total
        self._garbage = seed % 127 * 0x01010101
        self._workspace = torch.full((self._words + GUARD,), self._garbage, dtype=torch.int32)
        self._buffer = torch.full((self._size + GUARD,), 0xA5, dtype=torch.uint8)
        self._layout = planner.layout

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._workspace[: self._words], self._buffer[: self._size]

    def plan(self) -> Plan:
        """What was written; nothing behind the memory was."""
        assert (self._workspace[self._words :] == self._garbage).all()
        assert (self._buffer[self._size :] == 0xA5).all()
        return Plan(self._buffer[: self._size].numpy(), self._layout)


def plan_as_device(
    planner: Planner, qo_indptr: torch.Tensor, kv_lens: torch.Tensor, threads: int, seed: int = 1
) -> Plan:
    """Plan in a block of `threads`."""
    memory = _Memory(planner, seed)
    plan = getattr(module(), f"plan_{threads}")
    plan(planner.config, qo_indptr, kv_lens, *memory.tensors, seed)
    return memory.plan()


def plan_shared_as_device(
    planner: Planner,
    qo_indptr: torch.Tensor,
    table: PageTable,
    blocks: str,
    seed: int = 1,
    limits: torch.Tensor | None = None,
    tally: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Plan:
    """Find prefixes and plan in a cluster, `blocks`: threads and blocks of it, "128_3".

    others: int32 as the table's indices, which all blocks but the first see in their place.
    counts: int64 [4], filled with the fields of BlockCounts (unit/native/fiber_block.h).
    """
    memory = _Memory(planner, seed)
    plan = getattr(module(), f"plan_shared_{blocks}")
    plan(
        planner.config,
        qo_indptr,
        table.kv_lens,
        table.indices,
        table.row_begin,
        table.row_end,
        table.index_step,
        table.page_size,
        limits,
        tally,
        *memory.tensors,
        seed,
        others,
        torch.empty(4, dtype=torch.int64) if counts is None else counts,
    )
    return memory.plan()
