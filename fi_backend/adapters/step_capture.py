# SPDX-License-Identifier: Apache-2.0
"""Saves steps of a serving process as files where `fi-backend stats DIR --capture` has asked for them."""

from __future__ import annotations

import itertools
import logging

from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import STEP_FILES, counters, step_file
from fi_backend.core.page_table import PageTable
from fi_backend.core.step import Step, save_step

from .host_plan import may_wait

_plans = itertools.count()


class StepCapture:
    """Saves the steps of one BatchAttention; costs a comparison where nobody has asked.

    log: gets a line for each file, or why there is none: serving goes on whatever happens here.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._answered = 0
        self._plan: int | None = None

    def offer(self, attention: BatchAttention, qo_indptr: Tensor, table: PageTable, requests: int) -> None:
        """Save a step that has just been planned, if it was asked for; waits for the device then.

        qo_indptr, table: as they were given to plan(). requests: without padding behind them. While a graph
        is captured nothing is saved.
        """
        if self._answered >= counters().wanted_steps or not may_wait(qo_indptr):
            return
        self._answered += 1
        number = self._answered
        if self._plan is None:
            self._plan = next(_plans)
        try:
            self._save(attention, qo_indptr[: requests + 1], _first(table, requests))
        except Exception as error:  # noqa: BLE001 - a full disk, a table that is being written, no memory
            self._log.warning("step %d was not saved: %r", number, error)

    def _save(self, attention: BatchAttention, qo_indptr: Tensor, table: PageTable) -> None:
        assert self._plan is not None
        step = Step.capture(
            attention.spec,
            qo_indptr,
            table,
            num_ctas=attention.num_ctas,
            device=attention.device.type,
            tiles=attention.planner.tiles,
        )
        folder_of = counters().path
        assert folder_of is not None, "steps are asked for through the file of the counters"
        path = step_file(folder_of, self._answered, self._plan)
        # Renamed into place when complete, so that nobody draws half a step.
        temporary = path.with_suffix(".new")
        try:
            save_step(temporary, step)
            temporary.replace(path)
        except OSError:
            self._answered = counters().wanted_steps  # the others would not fit either
            temporary.unlink(missing_ok=True)
            raise
        counters().add(STEP_FILES)
        self._log.info("saved a step: fi-backend explain --step %s", path)


def _first(table: PageTable, requests: int) -> PageTable:
    return PageTable(
        table.indices,
        table.row_begin[:requests],
        table.row_end[:requests],
        table.kv_lens[:requests],
        table.page_size,
        table.index_step,
        table.index_divisor,
    )
