# SPDX-License-Identifier: Apache-2.0
"""The documentation builds: no link is dead, and every picture shows what `explain` draws today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert built.returncode == 0, built.stdout
    return folder


def test_pages_and_pictures(site: Path) -> None:
    concepts = (site / "concepts.html").read_text()
    for step in (ROOT / "docs" / "steps").glob("*.json"):
        assert f'src="pictures/{step.stem}.svg"' in concepts
        assert "CTA loads" in (site / "pictures" / f"{step.stem}.svg").read_text()


def test_the_reference_comes_from_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "attention.html").read_text()
    assert "Balance one step; every layer of the step then calls run()" in page
    assert "fi_backend.core.attention.BatchAttention.run" in page


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for attribute in ('src="http', 'rel="stylesheet" href="http'):
            assert attribute not in page.read_text(), page.name
