# SPDX-License-Identifier: Apache-2.0
"""`make demo-sglang`: SGLang's own server over HTTP."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fi_backend import env

pytest.importorskip("sglang", reason="SGLang is not installed")

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "demo_sglang.py"


def test_the_demo_answers_on_fi() -> None:
    child = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=400,
        env=env.child_environment(),
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "answer correct" in child.stdout
    assert "--attention-backend fi" in child.stdout
