# SPDX-License-Identifier: Apache-2.0
"""The definitions in float64 that variants are held against."""

from __future__ import annotations

import pytest
import torch

from fi_backend.benchmarks.variant_oracles import ORACLES, Request


def request_of(tokens: int) -> Request:
    """All rows and keys of one request with one head, whose key i has the value i."""
    positions, ones = torch.arange(tokens), torch.ones(tokens, 1, 1, dtype=torch.float64)
    values = positions.double()[:, None, None]
    return Request(
        q=ones, k=ones, v=values, q_pos=positions, kv_pos=positions, scale=1.0, index=0, tokens=positions
    )


@pytest.mark.parametrize("slope", [1.0, 2.0])
def test_keys_behind_a_row_weigh_nothing_whatever_their_logits_are(slope: float) -> None:
    """ALiBi adds slope * 1999 to the last key's logit of the first row, whose exponential is infinite."""
    tokens = 2000
    out, amplitude = ORACLES["alibi"].attention(request_of(tokens), {"slopes": torch.tensor([slope])})
    assert out[0, 0, 0] == 0
    weights = torch.exp(-slope * torch.arange(tokens, dtype=torch.float64))
    mean_distance = (weights * torch.arange(tokens)).sum() / weights.sum()
    assert out[-1, 0, 0] == pytest.approx(float(tokens - 1 - mean_distance))
    assert torch.equal(out, amplitude)
