# SPDX-License-Identifier: Apache-2.0
"""How long the items of steps of few tickets are: as long as the estimated end of a step is early."""

from __future__ import annotations

import pytest
from plan_cases import PlanCase

CTAS = 132


@pytest.mark.parametrize(
    ("requests", "items"),
    [
        pytest.param(16, 16, id="no CTA gets a second item, with which it could be late"),
        pytest.param(24, 48, id="halves let a CTA that is late be late by half an item"),
    ],
)
def test_what_being_late_costs(requests: int, items: int) -> None:
    case = PlanCase((1,) * requests, (100_000,) * requests, group=4, heads=8, num_ctas=CTAS)
    assert case.plan().header["num_items"] == items


def test_a_few_long_requests_give_nearly_each_cta_one_item_and_none_two() -> None:
    """Chunks of exactly the ideal share would be more than there are CTAs: each request ends with a part."""
    case = PlanCase((1,) * 5, (61_000, 83_500, 97_300, 120_700, 149_900), num_ctas=CTAS)
    assert 120 <= case.plan().header["num_items"] <= CTAS
