# SPDX-License-Identifier: Apache-2.0
"""The adapter of SGLang, tested in the environment that `make test` makes for SGLang over this one."""

from __future__ import annotations

import importlib.util
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fi_backend import env

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-sglang"


@pytest.fixture(scope="module")
def interpreter() -> Path:
    """Return the Python of the environment, which the Makefile stamps once all is installed."""
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed in this environment, where its tests run by themselves")
    if not any(ENVIRONMENT.glob(".sglang-*")):
        pytest.skip("SGLang could not be installed, or was not asked for: `make test-sglang` says which")
    return ENVIRONMENT / "bin" / "python"


def run(interpreter: Path, report: Path, files: Sequence[Path]) -> Counter[str]:
    """Run test files and return how many tests of each, by its name, passed; any failure fails this test."""
    command = [str(interpreter), "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--junitxml={report}"]
    child = subprocess.run(
        [*command, *map(str, files)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env.child_environment(),
        timeout=3600,
        check=False,
    )
    assert child.returncode == 0, child.stdout
    return Counter(
        case.attrib["classname"].rpartition(".")[2]
        for case in ElementTree.parse(report).iter("testcase")
        if case.find("skipped") is None
    )


def test_every_hook_on_sglangs_own_layers_and_pools(interpreter: Path, tmp_path: Path) -> None:
    files = sorted((ROOT / "tests" / "unit").glob("test_sglang_adapter_*.py"))
    passed = run(interpreter, tmp_path / "report.xml", files)
    # A file whose import fails is no file that was skipped.
    assert set(passed) == {file.stem for file in files}
    assert passed.total() > 150


def test_an_engine_serves_the_known_answer(interpreter: Path, tmp_path: Path) -> None:
    file = Path(__file__).with_name("test_sglang_demo.py")
    assert run(interpreter, tmp_path / "report.xml", [file]) == {"test_sglang_demo": 1}
