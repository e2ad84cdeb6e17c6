# SPDX-License-Identifier: Apache-2.0
"""How evenly the planner spreads the decode steps of a run, sampled at moments of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fi_backend.cli.explain_model import explain_step
from fi_backend.core.planner import CostModel
from fi_backend.core.step import Step

if TYPE_CHECKING:
    from fi_backend.benchmarks.serving.model import ServedModel
    from fi_backend.benchmarks.serving.summary import Measured

MOMENTS = 8


def balance_of(
    model: ServedModel, *, cpu: bool, num_ctas: int, page_size: int = 16
) -> Callable[[Sequence[Measured]], dict[str, Any]]:
    """Return the function runs -> {"balance": ...}, {} where the model's shape is not known.

    The batch of a moment is put together from the client's times: all samples between their first and last
    token, with the KV that they have by then. Its flat plan over `num_ctas` gives the loads.
    """

    costs = CostModel.for_device(torch.device("cpu" if cpu else "cuda"))

    def examine(runs: Sequence[Measured]) -> dict[str, Any]:
        if model.heads is None or model.kv_heads is None or model.head_dim is None:
            return {}
        steps = []
        for kv_lens in sampled_batches(runs, MOMENTS):
            step = Step(
                qo_indptr=np.arange(len(kv_lens) + 1, dtype=np.int32),
                kv_lens=np.asarray(kv_lens, np.int32),
                page_size=page_size,
                num_qo_heads=model.heads,
                num_kv_heads=model.kv_heads,
                head_dim=model.head_dim,
            )
            loads = explain_step(step, num_ctas=num_ctas, costs=costs).loads
            steps.append(
                {
                    "requests": len(kv_lens),
                    "kv_tokens": int(sum(kv_lens)),
                    "max_over_mean": round(loads.imbalance, 4),
                }
            )
        return {"balance": {"num_ctas": num_ctas, "steps": steps}} if steps else {}

    return examine


def sampled_batches(runs: Sequence[Measured], moments: int) -> list[list[int]]:
    """Return the KV lengths of the samples that were decoding at `moments` times of the last run."""
    spans: list[tuple[int, list[float]]] = []
    for request, outcome in zip(runs[-1].requests, runs[-1].load.outcomes, strict=True):
        spans += [
            (len(request.prompt), [request.at + at for at in times])
            for times in outcome.times
            if len(times) > 1
        ]
    if not spans:
        return []
    # Moments at which tokens came: the engine was decoding then, however little it had to do.
    known = np.sort([at for _, times in spans for at in times[:-1]])
    batches = []
    for moment in known[np.linspace(0, len(known) - 1, moments + 2)[1:-1].round().astype(int)]:
        batch = [
            prompt + int(np.searchsorted(times, moment, side="right"))
            for prompt, times in spans
            if times[0] <= moment < times[-1]
        ]
        if batch:
            batches.append(batch)
    return batches
