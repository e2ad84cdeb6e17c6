# SPDX-License-Identifier: Apache-2.0
"""What a test may vary of a batch; tests/attention_batch.py makes it and runs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_memory import Layout

from fi_backend.core.planner import CostModel
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step of one layer."""

    spec: AttentionSpec
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    layout: Layout = field(default_factory=Layout)
    bound_slack: tuple[int, ...] = ()  # what the host's upper bounds add to the lengths
    k_scale: float | tuple[float, ...] = 1.0
    v_scale: float | tuple[float, ...] = 1.0
    gain: float = 1.0
    num_ctas: int = 2
    planned_queues: bool = False
    longest_first: bool = True
    costs: CostModel | None = None
    seed: int = 0
    device: str = "cpu"
    host_lengths: bool = True  # on CUDA: the host planner; otherwise the device planner
    # (earlier request, pages) of each request: it begins with so many pages of the other one, full ones.
    shares: tuple[tuple[int, int], ...] = ()
    sharing: SharingLimits | None = None  # capacity for them; the step is then planned with its forest
