# SPDX-License-Identifier: Apache-2.0
"""`make demo-sglang`: SGLang's own server over HTTP."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fi_backend import env

pytestmark = [
    pytest.mark.engine,
    # Looked for, not imported: this process lacks the stand-ins that the demo gives to its server.
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_sglang.py"


def test_the_demo_answers_on_fi() -> None:
    child = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=1500,
        env=env.child_environment(),
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "answer correct" in child.stdout
    assert "--attention-backend fi" in child.stdout
