# SPDX-License-Identifier: Apache-2.0
"""The switch for the tests that compile the kernels for other instruction sets."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch."""
    parser.addoption(
        "--other-isa",
        action="store_true",
        help="also compile and test the kernels for other instruction sets",
    )
