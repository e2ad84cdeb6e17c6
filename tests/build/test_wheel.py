# SPDX-License-Identifier: Apache-2.0
"""The distributions: what they carry, and that a module builds from an installed wheel alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
from pathlib import Path
import fi_backend
from fi_backend.core import jit
package = Path({target!r}) / "fi_backend"
assert Path(fi_backend.__file__).parent == package, fi_backend.__file__
assert jit.csrc_root() == package / "csrc", jit.csrc_root()
from fi_backend.core.planner import MODULE
print(sorted(dir(jit.load(MODULE))) and "loaded")
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("dist")
    # As a release does: the sdist from the checkout, the wheel from the sdist.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    [wheel] = out.glob("*.whl")
    [sdist] = out.glob("*.tar.gz")
    return wheel, sdist


def native_sources() -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*") if path.is_file()}


def test_both_carry_the_native_sources(distributions: tuple[Path, Path]) -> None:
    wheel, sdist = distributions
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
    assert {f"fi_backend/{name}" for name in native_sources()} <= in_wheel
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert native_sources() <= in_sdist
    assert {"fi_backend/py.typed", "fi_backend/env.py"} <= in_wheel & in_sdist
    assert not any(name.startswith(("tests/", "scripts/")) for name in in_wheel)


def test_entry_points(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        text = archive.read(name).decode()
    assert "[vllm.general_plugins]\nfi_backend = fi_backend.adapters.vllm.plugin:register" in text
    assert "[console_scripts]\nfi-backend = fi_backend.cli.main:app" in text


def test_installed_wheel_builds_and_loads_a_module(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = ["install", "-q", "--no-deps", "--no-index", "--target", str(target), str(distributions[0])]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    environment = {**os.environ, "PYTHONPATH": str(target), "FI_BACKEND_CACHE_DIR": str(tmp_path / "cache")}
    program = PROGRAM.format(target=str(target))
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "loaded"
