# SPDX-License-Identifier: Apache-2.0
"""The cache key changes with everything that the binary depends on, and with nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from tiny_module import TinyModule

from fi_backend.core.jit import compiler, isa, tools
from fi_backend.core.jit import key as jit_key
from fi_backend.core.jit.sources import dependency_texts


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModule:
    return TinyModule.create(tmp_path / "source")


@pytest.fixture
def key(tiny: TinyModule, tmp_path: Path) -> str:
    return jit_key.module_key(tiny.spec(), tmp_path)


def test_same_content_elsewhere_has_the_same_key(key: str, tmp_path: Path) -> None:
    assert jit_key.module_key(TinyModule.create(tmp_path / "other").spec(), tmp_path) == key


@pytest.mark.parametrize("file", ["kernel.cc", "binding.cc", "factor.h", "deeper.h"])
def test_edit_of_a_source_or_of_a_header_at_any_depth(
    key: str, tiny: TinyModule, tmp_path: Path, file: str
) -> None:
    path = tiny.folder / file
    path.write_text(path.read_text() + "// edited\n")
    assert jit_key.module_key(tiny.spec(), tmp_path) != key


def test_name_defines_and_generated_text(key: str, tiny: TinyModule, tmp_path: Path) -> None:
    specs = [
        tiny.spec(name="other"),
        tiny.spec(defines=(("FACTOR", "1"),)),
        tiny.spec(defines=(("FACTOR", "2"),)),
        tiny.spec(offset="1.5"),
    ]
    keys = {key, *(jit_key.module_key(spec, tmp_path) for spec in specs)}
    assert len(keys) == 5


def test_flags(key: str, tiny: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CPU_FLAGS", (*compiler.CPU_FLAGS, "-g"))
    assert jit_key.module_key(tiny.spec(), tmp_path) != key


def test_instruction_set(key: str, tiny: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = isa.host_isa()
    [extension] = [word for word in ("sse2", "asimd") if f" {word} " in here]
    monkeypatch.setattr(jit_key, "host_isa", lambda: here.replace(f" {extension} ", " "))
    assert jit_key.module_key(tiny.spec(), tmp_path) != key


def test_tvm_ffi_version(key: str, tiny: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_key.importlib.metadata, "version", lambda _: "0.1.99")
    assert jit_key.module_key(tiny.spec(), tmp_path) != key


def test_compiler_version_is_remembered_until_its_file_changes(tmp_path: Path) -> None:
    tool = tmp_path / "g++"
    calls = tmp_path / "calls"

    def write(version: str) -> None:
        tool.write_text(f"#!/bin/sh\necho called >> {calls}\necho 'g++ {version}'\n")
        tool.chmod(0o755)

    write("1.0")
    assert tools.identity(str(tool), tmp_path).endswith("g++ 1.0")
    tools._identity.cache_clear()
    assert tools.identity(str(tool), tmp_path).endswith("g++ 1.0")
    assert calls.read_text().count("called") == 1
    write("22.0")
    assert tools.identity(str(tool), tmp_path).endswith("g++ 22.0")


def test_damaged_memo_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "compilers.json").write_text("{")
    tools._identity.cache_clear()
    cxx = compiler.toolchain("cpu").cxx
    assert tools.identity(cxx, tmp_path).startswith(cxx)
    assert len(json.loads((tmp_path / "compilers.json").read_text())) == 1


def test_include_cycles_end_and_conditional_includes_count(tmp_path: Path) -> None:
    tiny = TinyModule.create(tmp_path / "source")
    (tiny.folder / "deeper.h").write_text('#if 0\n#  include "factor.h"\n#include "behind.h"\n#endif\n')
    (tiny.folder / "behind.h").write_text("")
    labels = [label for label, _ in dependency_texts(tiny.spec())]
    assert sorted(labels) == [
        "generated/offset.h",
        "header/behind.h",
        "header/deeper.h",
        "header/factor.h",
        "source/binding.cc",
        "source/kernel.cc",
    ]


def test_spec_is_usable_as_a_key(tmp_path: Path) -> None:
    tiny = TinyModule(tmp_path)
    assert {tiny.spec(): 1}[dataclasses.replace(tiny.spec())] == 1
