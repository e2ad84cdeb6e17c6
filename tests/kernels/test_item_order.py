# SPDX-License-Identifier: Apache-2.0
"""Work items in the order of the requests, not longest first: the oracle's numbers, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attention_batch import SPLIT_COSTS, Batch, EngineState, check, torch_threads
from numeric import assert_bitwise_equal

from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec

SPEC = AttentionSpec(8, 2, 64, dtype="bfloat16", page_size=16)
MIXED = Batch(
    spec=SPEC, q_lens=(1, 40, 0, 3, 1), kv_lens=(30, 700, 9, 1500, 420), num_ctas=16, costs=SPLIT_COSTS
)
SHARED = Batch(
    spec=SPEC,
    q_lens=(1, 2, 1, 1, 3, 1),
    kv_lens=(660, 650, 900, 645, 1200, 1100),
    shares=((0, 0), (0, 40), (0, 40), (0, 40), (2, 50), (2, 50)),
    sharing=SharingLimits(max_nodes=8, max_levels=3, max_tokens=16),
    num_ctas=16,
    costs=replace(SPLIT_COSTS, alpha=0, part_cost=0),
)
BATCHES = {
    "split": MIXED,
    "batch-invariant": replace(MIXED, spec=replace(SPEC, batch_invariant=True)),
    "queues": replace(MIXED, planned_queues=True),
    "shared prefixes": SHARED,
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_bits_do_not_depend_on_the_order(batch: Batch) -> None:
    unordered = check(replace(batch, longest_first=False))
    ordered = EngineState(batch)
    with torch_threads(1):
        expected = ordered.run(ordered.attention())
        found = unordered.run(unordered.attention())
    assert (unordered.plan.items["request"] != ordered.plan.items["request"]).any(), (
        "the order is another one"
    )
    assert unordered.plan.header["num_units"] > 0, "tiles are split"
    assert unordered.plan.header["num_nodes"] == ordered.plan.header["num_nodes"]
    assert (unordered.plan.header["num_nodes"] > 0) == (batch.sharing is not None)
    assert_bitwise_equal("out", unordered.inside(found[0]), ordered.inside(expected[0]))
    assert_bitwise_equal("lse", unordered.inside(found[1]), ordered.inside(expected[1]))
