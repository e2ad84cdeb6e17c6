# SPDX-License-Identifier: Apache-2.0
"""How evenly the planner spreads the decode steps of a run, sampled at moments of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fi_backend.cli.explain_model import cta_loads
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import PREFIX, Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

if TYPE_CHECKING:
    from fi_backend.benchmarks.serving.model import ServedModel
    from fi_backend.benchmarks.serving.protocols import Request
    from fi_backend.benchmarks.serving.summary import Measured

MOMENTS = 8


@dataclass(frozen=True)
class Decoding:
    """A sample that was decoding: of which request of the run, and the KV tokens that it had."""

    request: int
    kv_len: int


def balance_of(
    model: ServedModel, *, cpu: bool, num_ctas: int, page_size: int = 16
) -> Callable[[Sequence[Measured], bool], dict[str, Any]]:
    """Return the function (runs, shared) -> {"balance": ...}, {} where the model's shape is not known.

    The batch of a moment is put together from the client's times: all samples between their first and last
    token, with the KV that they have by then. Its plan over `num_ctas` gives the loads: with shared, the plan
    reads the prefixes together that the workload gave its requests, and the prompts of parallel samples.
    """

    costs = CostModel.for_device(torch.device("cpu" if cpu else "cuda"))

    def examine(runs: Sequence[Measured], shared: bool) -> dict[str, Any]:
        if model.heads is None or model.kv_heads is None or model.head_dim is None:
            return {}
        spec = AttentionSpec(model.heads, model.kv_heads, model.head_dim, page_size=page_size)
        steps = []
        for batch in sampled_batches(runs, MOMENTS):
            kv_lens = torch.tensor([each.kv_len for each in batch], dtype=torch.int32)
            pages = block_table(runs[-1].requests, batch, page_size) if shared else None
            plan = _plan(spec, kv_lens, pages, num_ctas, costs)
            steps.append(
                {
                    "requests": len(batch),
                    "kv_tokens": int(kv_lens.sum()),
                    "prefix_nodes": int(np.unique(_prefix_items(plan)["request"]).size),
                    "max_over_mean": round(cta_loads(plan).imbalance, 4),
                }
            )
        about = {"num_ctas": num_ctas, "shared": shared, "page_size": page_size}
        return {"balance": {**about, "steps": steps}} if steps else {}

    return examine


def sampled_batches(runs: Sequence[Measured], moments: int) -> list[list[Decoding]]:
    """Return the samples that were decoding at `moments` times of the last run."""
    spans: list[tuple[int, int, list[float]]] = []
    pairs = zip(runs[-1].requests, runs[-1].load.outcomes, strict=True)
    for index, (request, outcome) in enumerate(pairs):
        spans += [
            (index, len(request.prompt), [request.at + at for at in times])
            for times in outcome.times
            if len(times) > 1
        ]
    if not spans:
        return []
    # Moments at which tokens came: the engine was decoding then, however little it had to do.
    known = np.sort([at for _, _, times in spans for at in times[:-1]])
    batches = []
    for moment in known[np.linspace(0, len(known) - 1, moments + 2)[1:-1].round().astype(int)]:
        batch = [
            Decoding(index, prompt + int(np.searchsorted(times, moment, side="right")))
            for index, prompt, times in spans
            if times[0] <= moment < times[-1]
        ]
        if batch:
            batches.append(batch)
    return batches


def block_table(requests: Sequence[Request], batch: Sequence[Decoding], page_size: int) -> torch.Tensor:
    """Return a block table in which equal page ids are equal tokens, int32 [samples, pages], padded with 0.

    Whole pages of prefix blocks belong to all who have the same blocks from the start, whole pages of the
    rest of a prompt to all samples of the request, and the others to one sample.
    """
    known: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return known.setdefault(key, len(known))

    rows = []
    for sample, each in enumerate(batch):
        request = requests[each.request]
        prompt = len(request.prompt) // page_size
        node, nodes = -1, []
        for block in request.prefix:
            nodes.append(node := number((node, block)))
        of_token = np.repeat(np.asarray(nodes, np.int64), [tokens for _, tokens in request.prefix])
        # A page is known by the node of its last token, which stands for all that comes before it.
        last = of_token[: len(request.prompt)][page_size - 1 :: page_size].tolist()
        keys: list[Hashable] = [("prefix", node, page) for page, node in enumerate(last)]
        keys += [("prompt", each.request, page) for page in range(len(last), prompt)]
        keys += [("own", sample, page) for page in range(prompt, -(-each.kv_len // page_size))]
        rows.append(torch.tensor([number(key) for key in keys], dtype=torch.int32))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _plan(
    spec: AttentionSpec, kv_lens: torch.Tensor, pages: torch.Tensor | None, num_ctas: int, costs: CostModel
) -> Plan:
    """Plan a step in which every sample has one query token."""
    count = kv_lens.shape[0]
    limits = Limits(count, count, int(kv_lens.max()))
    sharing = None if pages is None else SharingLimits.for_limits(count, count)
    planner = Planner(spec, limits, num_ctas=num_ctas, costs=costs, sharing=sharing)
    qo_indptr = torch.arange(count + 1, dtype=torch.int32)
    forest = None
    if pages is not None:
        table = PageTable.from_block_table(pages, kv_lens, page_size=spec.page_size)
        forest = PrefixForest.of_step(
            table, qo_indptr, kv_lens, group=spec.group_size, max_tile=planner.tiles[1]
        )
    buffer = torch.zeros(planner.layout.total, dtype=torch.uint8)
    planner.plan(qo_indptr, kv_lens, buffer, forest)
    return Plan(buffer.numpy(), planner.layout)


def _prefix_items(plan: Plan) -> Any:
    return plan.items[plan.items["flags"] & PREFIX != 0]
