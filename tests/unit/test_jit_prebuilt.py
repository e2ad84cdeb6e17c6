# SPDX-License-Identifier: Apache-2.0
"""A cache that another machine filled: found without a compiler, refused with the reason, chosen by fit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_module import TinyModule

from fi_backend.core.jit import build, build_all, isa, load, locate
from fi_backend.core.jit import key as jit_key
from fi_backend.errors import BuildError

FEATURE = {"x86_64": "avx512_of_tomorrow", "aarch64": "sve9"}.get(platform.machine(), "unknown")

BARE = """
import sys
sys.modules["ninja"] = None
sys.path[:0] = {path!r}
from pathlib import Path
from tiny_module import TinyModule
from fi_backend.core.jit import load
print(load(TinyModule(Path({folder!r})).spec()).scaled(2.0))
"""


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModule:
    return TinyModule.create(tmp_path / "source")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, with nothing loaded and compiling allowed."""
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FI_BACKEND_DISABLE_JIT", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def foreign(cache: Path, tiny: TinyModule) -> Path:
    """A finished module under a key that no compiler of this machine gives; returns its folder."""
    [library] = build_all([tiny.spec()])
    folder = cache / "tiny-0123456789abcdef"
    library.parent.rename(folder)
    return folder


@pytest.fixture
def no_compiler(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on neither compilers nor ninja can be found."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ninja", None)


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "module.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def copy(folder: Path, key: str, **fields: Any) -> Path:
    other = folder.with_name(f"tiny-{key}")
    shutil.copytree(folder, other)
    edit(other, **fields)
    return other


def test_a_bare_process_loads_it(foreign: Path, tiny: TinyModule, tmp_path: Path) -> None:
    shutil.copytree(foreign.parent, tmp_path / "elsewhere")
    here = Path(__file__).resolve().parent
    program = BARE.format(path=[str(here), str(here.parents[1])], folder=str(tiny.folder))
    environment = {**os.environ, "PATH": "", "FI_BACKEND_CACHE_DIR": str(tmp_path / "elsewhere")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (run.stdout.strip(), run.returncode) == ("20.5", 0), run.stderr
    assert "compiling" not in run.stderr


@pytest.mark.usefixtures("no_compiler")
def test_an_edited_source_is_refused(foreign: Path, tiny: TinyModule) -> None:
    header = tiny.folder / "deeper.h"
    header.write_text(header.read_text() + "// edited\n")
    with pytest.raises(BuildError) as caught:
        load(tiny.spec())
    text = str(caught.value)
    assert text.startswith("g++: not found on PATH; install GCC")
    assert f"the cache {foreign.parent} does not hold tiny (cpu)" in text
    assert f"{foreign.name}: sources differ (fi_backend 0" in text


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"features": [FEATURE]}, f"this processor lacks {FEATURE}"),
        ({"machine": "riscv64"}, "it is for riscv64, here is "),
        ({"tvm_ffi": "0.1.9999"}, "it needs tvm-ffi 0.1.9999, here is "),
        ({"tvm_ffi": "0.0.1"}, "it needs tvm-ffi 0.0.1, here is "),
        ({"parts": {"target": "sm_80"}}, "it is for sm_80"),
    ],
)
def test_what_does_not_run_here_is_refused(
    foreign: Path, tiny: TinyModule, fields: dict[str, Any], reason: str
) -> None:
    edit(foreign, **fields)
    with pytest.raises(BuildError, match=reason):
        load(tiny.spec())


@pytest.mark.usefixtures("no_compiler")
def test_the_best_fit_is_taken(foreign: Path, tiny: TinyModule) -> None:
    features = json.loads((foreign / "module.json").read_text())["features"]
    copy(foreign, "f" * 16, features=features[:-1])
    copy(foreign, "e" * 16, features=[*features, FEATURE])
    assert build_all([tiny.spec()]) == [foreign / "module.so"]
    older = copy(foreign, "d" * 16, tvm_ffi="0.1.0")
    assert build_all([tiny.spec()]) == [foreign / "module.so"]
    shutil.rmtree(foreign)
    assert build_all([tiny.spec()]) == [older / "module.so"]


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("damage", ["", "{", "[]", '{"package": "1"}'])
def test_a_module_without_a_readable_record_is_no_candidate(
    foreign: Path, tiny: TinyModule, damage: str
) -> None:
    (foreign / "module.json").write_text(damage)
    with pytest.raises(BuildError, match="does not hold tiny"):
        load(tiny.spec())


def test_other_compilers_work_is_taken_but_not_that_for_a_lesser_processor(
    foreign: Path, tiny: TinyModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build_all([tiny.spec()]) == [foreign / "module.so"]
    edit(foreign, features=[])
    monkeypatch.setenv("FI_BACKEND_DISABLE_JIT", "1")
    assert build_all([tiny.spec()]) == [foreign / "module.so"]
    monkeypatch.delenv("FI_BACKEND_DISABLE_JIT")
    [library] = build_all([tiny.spec()])
    assert library.parent != foreign
    assert build_all([tiny.spec()]) == [library]


def test_portable_build_runs_on_lesser_processors(
    cache: Path, tiny: TinyModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"no portable flags for {platform.machine()}")
    if not isa.portable_features() <= isa.host_features():
        pytest.skip("this processor lacks what portable builds need")
    [library] = build_all([tiny.spec()], portable=True)
    assert build_all([tiny.spec()], portable=True) == [library]
    record = json.loads((library.parent / "module.json").read_text())
    assert set(record["features"]) == isa.portable_features()
    log = (library.parent / "build.log").read_text()
    assert isa.portable_flags()[0] in log
    assert "-march=native" not in log

    # Here the compilers would make a better one; without them this one serves.
    assert locate.locate(tiny.spec(), cache).ready is None
    monkeypatch.setenv("PATH", "")
    assert locate.locate(tiny.spec(), cache).ready == library.parent
    assert load(tiny.spec()).scaled(2.0) == 20.5


def test_the_record_of_a_native_build(foreign: Path, tiny: TinyModule) -> None:
    record = json.loads((foreign / "module.json").read_text())
    assert set(record["features"]) == isa.host_features()
    assert record["machine"] == platform.machine()
    assert record["tvm_ffi"] == jit_key.ffi_version()
    assert record["parts"] == jit_key.source_parts(tiny.spec())
    assert any("g++" in compiler for compiler in record["compilers"])


def test_a_library_that_does_not_load_is_a_build_error(foreign: Path, tiny: TinyModule) -> None:
    (foreign / "module.so").write_bytes(b"no library")
    with pytest.raises(BuildError, match=r"cannot be loaded here \(.*run `fi-backend build` on one with"):
        load(tiny.spec())
