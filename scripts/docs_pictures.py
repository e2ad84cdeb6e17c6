# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: draws the pictures of the documentation with `fi-backend explain`: they show what is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "docs" / "steps"
PICTURES = ROOT / "docs" / "pictures"


def on_pre_build(**_: Any) -> None:
    """Draw every saved step; a picture that is newer than its step and the planner is left alone."""
    PICTURES.mkdir(exist_ok=True)
    for step in sorted(STEPS.glob("*.json")):
        draw(step, PICTURES / f"{step.stem}.svg")


def draw(step: Path, picture: Path) -> None:
    """Draw one step; raises CalledProcessError with the command's own message on stderr."""
    sources = [step, *(ROOT / "csrc" / "core").glob("*"), *(ROOT / "fi_backend" / "cli").glob("explain*.py")]
    if picture.exists() and picture.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return
    code = "import sys; sys.argv[0] = 'fi-backend'; from fi_backend.cli.main import app; app()"
    command = [sys.executable, "-c", code, "explain", "--step", str(step), "--out", str(picture)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
