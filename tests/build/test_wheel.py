# SPDX-License-Identifier: Apache-2.0
"""The distributions: what they carry, and that an installed wheel alone builds a module and serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from fi_backend import env

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

# What pip makes of vLLM's entry point, and a record of where the package comes from. The record is at module
# level for the processes that vLLM spawns, which import the launcher again.
LAUNCHER = """#!{python}
import importlib.util, sys
from vllm.entrypoints.cli.main import main
with open({origins!r}, "a") as file:
    print(importlib.util.find_spec("fi_backend").origin, file=file)
if __name__ == "__main__":
    sys.exit(main())
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


@pytest.mark.engine
def test_installed_wheel_serves_with_vllm(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """An environment of the wheel and of the packages around it, none of them the checkout."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    home, origins = tmp_path / "venv", tmp_path / "origins.txt"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = ["--python", str(python), "install", "-q", "--no-deps", "--no-index", str(distributions[0])]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    # Bare paths: .pth files in those folders, by which an editable install works, are not followed.
    (site / "others.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    launcher = home / "bin" / "vllm"
    launcher.write_text(LAUNCHER.format(python=python, origins=str(origins)))
    launcher.chmod(0o755)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    # The modules are those of the checkout, byte for byte, and need no second compilation.
    environment = env.child_environment(FI_BACKEND_CACHE_DIR=str(env.cache_dir()), PYTHONPATH="")
    demo = subprocess.run(
        [str(python), str(tmp_path / "scripts" / "demo.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "back end fi served" in demo.stdout
    assert "answer correct" in demo.stdout
    assert set(origins.read_text().splitlines()) == {str(site / "fi_backend" / "__init__.py")}
