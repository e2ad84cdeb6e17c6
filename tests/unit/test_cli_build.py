# SPDX-License-Identifier: Apache-2.0
"""`fi-backend build`: which modules, and what it says about them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fi_backend.cli import modules
from fi_backend.cli.main import app
from fi_backend.core.jit import ModuleSpec

RUN = CliRunner()
_SOURCE = """
#include <tvm/ffi/tvm_ffi.h>
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one, [] { return 1; });
"""


def test_modules_of_dtypes() -> None:
    names = [spec.name for spec in modules.cpu_modules(["bfloat16", "float32"], ["auto", "float8_e5m2"])]
    assert names == [
        "planner",
        "cpu_ops",
        "cpu_attention_bfloat16_bfloat16",
        "cpu_attention_bfloat16_float8_e5m2",
        "cpu_attention_float32_float32",
        "cpu_attention_float32_float8_e5m2",
    ]
    assert len(modules.cpu_modules(["bfloat16"], ["auto", "bfloat16"])) == 3


def test_first_it_compiles_then_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "one.cc"
    source.write_text(_SOURCE)
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    spec = ModuleSpec(name="tiny", sources=(str(source),))
    monkeypatch.setattr("fi_backend.cli.build.cpu_modules", lambda *_: [spec])
    first = RUN.invoke(app, ["build"], env={"COLUMNS": "120"})
    assert first.exit_code == 0, first.stderr
    assert re.search(r"^tiny +[0-9a-f]{16} +\d+ +compiled$", first.stdout, re.MULTILINE)
    assert re.search(r"1 modules ready, 1 compiled in \d+\.\d s; cache: ", first.stdout)
    second = RUN.invoke(app, ["build"], env={"COLUMNS": "120"})
    assert re.search(r"^tiny +[0-9a-f]{16} +\d+ +in the cache$", second.stdout, re.MULTILINE)
    assert "1 modules ready, 0 compiled; cache: " in second.stdout


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = RUN.invoke(app, ["build"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: g++: not found on PATH; install GCC")


def test_a_bad_cache_folder_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", "relative")
    result = RUN.invoke(app, ["build"])
    assert result.exit_code == 2
    assert "FI_BACKEND_CACHE_DIR: expected an absolute path" in result.stderr
