# SPDX-License-Identifier: Apache-2.0
"""What a launch on a GPU reports of data that only the device sees."""

from __future__ import annotations

from fi_backend.core.plan import PlanLayout

_PLANNER_BITS = ~0xFF
# KernelFault of csrc/core/params.h, and what the device planner sets.
_FAULTS = {
    1: "page table: expected page ids inside the KV cache; got others. The rows concerned are NaN",
    2: (
        "kv_lens, qo_indptr: expected lengths within the rows of the page table and the tokens of q, in "
        "batch-invariant mode within the planned ones, and of requests that share a prefix the planned query "
        "starts, with the prefix before them; got others. The rows concerned are NaN"
    ),
    _PLANNER_BITS: "qo_indptr, kv_lens: expected lengths within the limits; got others, and planned nothing",
}


def faults_at(layout: PlanLayout) -> int:
    """Return where the int32 of fault bits lies in a plan buffer, in bytes."""
    return layout.counters + 4


def raise_faults(faults: int) -> None:
    """Raise ValueError for fault bits that are set."""
    if reasons := [text for bits, text in _FAULTS.items() if faults & bits]:
        raise ValueError("; ".join(reasons))
