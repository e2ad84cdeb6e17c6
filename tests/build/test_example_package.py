# SPDX-License-Identifier: Apache-2.0
"""The example package of docs/extending.md installs without a network and is found by its variant's name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "recency_attention"


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=EXAMPLE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_package_installs_and_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    installed = tmp_path / "installed"
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run("-m", "pip", "install", *options, "--target", str(installed), str(source))
    assert "largest error" in run("example.py", PYTHONPATH=str(installed))


def test_without_the_package_its_name_is_unknown() -> None:
    text = (
        "import fi_backend as fb; "
        "fb.BatchAttention(fb.AttentionSpec(1, 1, 16), max_requests=1, max_tokens=1, max_kv_len=1, "
        "variant='recency')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", text], capture_output=True, text=True, check=False, cwd=ROOT / "docs"
    )
    assert re.search(r"variant: expected one of alibi, .*; got 'recency'", done.stderr), done.stderr


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    for name in ("pyproject.toml", "recency_attention/__init__.py"):
        assert (EXAMPLE / name).read_text().strip() in page, name
