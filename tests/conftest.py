# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles. `ci` (the default) always draws the same examples; `thorough` is the opt-in search:

    pytest --hypothesis-profile=thorough

Tests state their number of examples with `examples.share(n)`: n under `ci`, twenty times as many under
`thorough`, a fifth under `quick`, which is for repetitions under other circumstances.

What a developer's terminal or a CI service sets for its own sake is taken away, and every test begins with
the same random numbers, whichever tests ran before it.
"""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from fi_backend import env

# Before anything is imported that looks at them: rich and typer fold and colour what they print accordingly.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR_FORCE"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "xterm"  # a dumb one has no colours
for _variable in env.VARIABLES:
    if _variable not in (env.CACHE_DIR, env.DISABLE_JIT, env.DEBUG):  # of those a run may have its own
        os.environ.pop(_variable.name, None)

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


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
