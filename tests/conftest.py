# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles. `ci` (the default) always draws the same examples; `thorough` is the opt-in search:

    pytest --hypothesis-profile=thorough

Tests state their number of examples with `examples.share(n)`: n under `ci`, twenty times as many under
`thorough`, a fifth under `quick`, which is for repetitions under other circumstances.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,  # the first example may compile a module
    "database": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", derandomize=True, max_examples=100, **_COMMON)
settings.register_profile("quick", derandomize=True, max_examples=20, **_COMMON)
settings.register_profile("thorough", max_examples=2000, **_COMMON)
settings.load_profile("ci")
