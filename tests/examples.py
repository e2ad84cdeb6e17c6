# SPDX-License-Identifier: Apache-2.0
"""How many examples a property test draws under the profile in use (see conftest.py)."""

from __future__ import annotations

from hypothesis import settings


def share(count: int) -> settings:
    """Settings of `count` examples under the default profile, and in proportion under another one."""
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
