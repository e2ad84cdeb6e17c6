# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what importing costs, what it exports, which variables it reads."""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import fi_backend
from fi_backend import env

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(fi_backend.__file__).parent


def test_import_loads_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys, fi_backend, fi_backend.env, fi_backend.adapters.vllm, fi_backend.adapters.sglang\n"
        "heavy = {'torch', 'vllm', 'sglang', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", fi_backend.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(fi_backend, name)
    assert value.__name__ == name
    assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        fi_backend.nonsense  # noqa: B018


def test_version_is_the_one_of_the_distribution() -> None:
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert fi_backend.__version__ == version


def test_readme_lists_the_environment_variables() -> None:
    row = re.compile(r"^\| `(FI_BACKEND_\w+)` \| (.+?) \| (.+?) \|$", re.MULTILINE)
    documented = row.findall((ROOT / "README.md").read_text())
    assert documented == [(v.name, v.default, v.meaning) for v in env.VARIABLES]
    assert len(documented) <= 5


def test_no_other_module_reads_the_environment() -> None:
    readers = set()
    for path in PACKAGE.rglob("*.py"):
        with path.open("rb") as file:
            names = {
                token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME
            }
        if names & {"environ", "getenv", "environb"}:
            readers.add(path.relative_to(PACKAGE).as_posix())
    assert readers == {"env.py"}


def test_every_source_names_its_licence() -> None:
    folders = [path for name in ("fi_backend", "csrc", "tests", "scripts") if (path := ROOT / name).is_dir()]
    suffixes = {".py", ".cc", ".h", ".cu", ".cuh"}
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    assert len(files) > 10
    lacking = [
        str(path) for path in files if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:120]
    ]
    assert lacking == []


class TestEnvironment:
    def test_cache_dir_prefers_its_variable_then_xdg_then_home(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "mine"))
        assert env.cache_dir() == tmp_path / "mine"
        monkeypatch.delenv("FI_BACKEND_CACHE_DIR")
        assert env.cache_dir() == Path("/xdg/fi_backend")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert env.cache_dir() == tmp_path / ".cache" / "fi_backend"

    @pytest.mark.parametrize(
        ("read", "name"), [(env.jit_disabled, "FI_BACKEND_DISABLE_JIT"), (env.debug, "FI_BACKEND_DEBUG")]
    )
    def test_flags_know_0_and_1_only(self, read, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(name, raising=False)
        assert read() is False
        for text, value in (("0", False), ("", False), ("1", True)):
            monkeypatch.setenv(name, text)
            assert read() is value
        monkeypatch.setenv(name, "true")
        with pytest.raises(ValueError, match=f"{name}: expected 0 or 1, got 'true'"):
            read()

    def test_mechanisms_to_do_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FI_BACKEND_WITHOUT", raising=False)
        assert env.without() == frozenset()
        for text, value in (
            ("", set()),
            ("lpt", {"lpt"}),
            ("sharing,device_plan", {"sharing", "device_plan"}),
            (" lpt sharing, lpt,", {"sharing", "lpt"}),
        ):
            monkeypatch.setenv("FI_BACKEND_WITHOUT", text)
            assert env.without() == value
        monkeypatch.setenv("FI_BACKEND_WITHOUT", "lpt,LPT")
        known = "sharing, lpt, device_plan, separated by commas"
        with pytest.raises(ValueError, match=f"FI_BACKEND_WITHOUT: expected any of {known}; got 'LPT' in"):
            env.without()

    def test_stats_dir(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("FI_BACKEND_STATS_DIR", raising=False)
        assert env.stats_dir() is None
        monkeypatch.setenv("FI_BACKEND_STATS_DIR", str(tmp_path))
        assert env.stats_dir() == tmp_path
        monkeypatch.setenv("FI_BACKEND_STATS_DIR", "here")
        with pytest.raises(ValueError, match="FI_BACKEND_STATS_DIR: expected an absolute path"):
            env.stats_dir()
        file = tmp_path / "file"
        file.touch()
        monkeypatch.setenv("FI_BACKEND_STATS_DIR", str(file))
        with pytest.raises(ValueError, match="expected a folder, got the file"):
            env.stats_dir()
