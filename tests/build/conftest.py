# SPDX-License-Identifier: Apache-2.0
"""The switch for the test that compiles every shipped CUDA instance."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch."""
    parser.addoption(
        "--cuda-all", action="store_true", help="compile all shipped CUDA instances, not a selection"
    )
