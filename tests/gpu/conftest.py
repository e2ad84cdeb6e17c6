# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder need a CUDA device and are skipped without one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def needs_a_cuda_device() -> None:
    """Skip the module where torch sees no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
