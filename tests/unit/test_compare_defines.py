# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/kernels/compare_defines.py reads from a `--way`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fi_backend.core.planner import CostModel

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


def test_costs_are_taken_out_of_the_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import compare_defines

    try:
        name, defines = compare_defines.parse_way("late:costs.overlap=1,FI_PDL=0,costs.alpha=12")
        device = torch.device("cpu")
        costs = compare_defines.costs_of(defines, device)
    finally:
        sys.modules.pop("compare_defines")
    assert (name, defines) == ("late", {"FI_PDL": "0"})
    assert costs == replace(CostModel.for_device(device), overlap=True, alpha=12)
    assert costs.overlap is True
