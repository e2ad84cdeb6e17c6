# SPDX-License-Identifier: Apache-2.0
"""Building one module in one process: cold, warm, failing, forbidden."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_module import TinyModule

from fi_backend.core.jit import ModuleSpec, build, build_all, load, tools
from fi_backend.errors import BuildError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FI_BACKEND_DISABLE_JIT", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModule:
    return TinyModule.create(tmp_path / "source")


def modules(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir() and path.name != "logs")


def test_cold_build_gives_a_working_module_and_tells_the_user(
    cache: Path, tiny: TinyModule, capfd: pytest.CaptureFixture[str]
) -> None:
    module = load(tiny.spec(defines=(("FACTOR", "3.0"),)))
    assert module.scaled(2.0) == 6.5
    assert len(modules(cache)) == 1
    shown = capfd.readouterr().err
    assert "compiling tiny (2 objects)" in shown
    assert "compiled tiny in" in shown


def test_warm_load_compiles_nothing_and_is_quick(
    cache: Path, tiny: TinyModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By processor time, since a busy machine stretches the wall clock; and no process is started."""
    [library] = build_all([tiny.spec()])
    built = library.stat().st_mtime_ns
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    seconds = []
    for _ in range(5):
        build._loaded.clear()
        start = time.thread_time()
        assert load(tiny.spec()).scaled(1.0) == 10.5
        seconds.append(time.thread_time() - start)
    assert library.stat().st_mtime_ns == built
    assert min(seconds) < 0.05
    assert load(tiny.spec()) is load(tiny.spec())


def test_several_modules_are_built_in_one_run(
    cache: Path, tiny: TinyModule, capfd: pytest.CaptureFixture[str]
) -> None:
    specs = [tiny.spec(name=f"tiny_{n}", offset=f"{n}.0") for n in range(3)]
    libraries = build_all(specs)
    assert [path.parent.name.rpartition("-")[0] for path in libraries] == ["tiny_0", "tiny_1", "tiny_2"]
    assert "compiling 3 modules (6 objects)" in capfd.readouterr().err
    assert [load(spec).scaled(1.0) for spec in specs] == [10.0, 11.0, 12.0]


def test_a_relative_cache_folder_lies_where_the_caller_stands(
    cache: Path, tiny: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ninja runs in a folder of its own, where the same path names another place."""
    monkeypatch.chdir(tmp_path)
    [library] = build_all([tiny.spec()], cache_dir=Path("near"))
    assert library.is_file()
    assert library.is_relative_to(tmp_path / "near")
    assert not cache.exists()


def test_modules_share_an_object_that_is_the_same(
    cache: Path, tiny: TinyModule, capfd: pytest.CaptureFixture[str]
) -> None:
    same = [replace(tiny.spec(name=name), generated=()) for name in ("one", "two")]
    (tiny.folder / "offset.h").write_text("#define OFFSET 0.25\n")
    build_all([*same, replace(same[0], name="three", defines=(("FACTOR", "2.0"),))])
    assert "compiling 3 modules (4 objects)" in capfd.readouterr().err
    assert [load(spec).scaled(1.0) for spec in same] == [10.25, 10.25]


def test_error_shows_command_output_and_log(cache: Path, tiny: TinyModule) -> None:
    (tiny.folder / "kernel.cc").write_text("int broken() { return undeclared_name; }\n")
    with pytest.raises(BuildError) as caught:
        load(tiny.spec())
    text = str(caught.value)
    assert "cannot build tiny" in text
    assert "-c" in text.split("command: ")[1].splitlines()[0]
    assert "undeclared_name" in text
    log = Path(text.rpartition("full log: ")[2])
    assert "undeclared_name" in log.read_text()
    assert modules(cache) == []


def test_the_log_of_many_modules_with_long_names_is_kept(cache: Path, tiny: TinyModule) -> None:
    names = [f"cpu_attention_{n}_" + "bfloat16_" * 10 for n in range(3)]
    nonsense = (("FACTOR", "nonsense"),)
    logs = []
    for some in (names, names[:2], names[:1], [names[0] + "other" * 5]):
        with pytest.raises(BuildError, match=f"cannot build {', '.join(some)} ") as caught:
            build_all([tiny.spec(name=name, defines=nonsense) for name in some])
        logs.append(Path(str(caught.value).rpartition("full log: ")[2]))
    assert all("nonsense" in log.read_text() for log in logs)
    assert all(len(log.name.encode()) < 128 and log.name.startswith("cpu_attention_0_") for log in logs)
    assert len(set(logs)) == len(logs)
    assert "-and-2-more-" in logs[0].name


def test_a_failing_module_does_not_discard_its_neighbours(cache: Path, tiny: TinyModule) -> None:
    broken = tiny.spec(name="broken", defines=(("FACTOR", "nonsense"),))
    with pytest.raises(BuildError, match="cannot build broken"):
        build_all([broken, tiny.spec(name="good")])
    assert [name.rpartition("-")[0] for name in modules(cache)] == ["good"]


def test_disabled_jit_names_module_and_remedy_but_uses_the_cache(
    cache: Path, tiny: TinyModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_all([tiny.spec(name="present")])
    monkeypatch.setenv("FI_BACKEND_DISABLE_JIT", "1")
    assert load(tiny.spec(name="present")).scaled(0.0) == 0.5
    with pytest.raises(BuildError, match=r"absent \(cpu\).*Run `fi-backend build` with"):
        load(tiny.spec(name="absent"))


def test_the_command_of_a_module_names_its_target_and_recipe(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_BACKEND_DISABLE_JIT", "1")
    cuda = ModuleSpec("cuda_ops", ("cuda/append.cu",), arch="sm_90a")
    attention = replace(cuda, name="cuda_attention", recipe="--head-dim 128")
    assert attention == replace(attention, recipe="")
    with pytest.raises(BuildError) as caught:
        build_all([cuda, attention])
    text = str(caught.value)
    assert "cuda_ops (sm_90a), cuda_attention (sm_90a)" in text
    assert "`fi-backend build --device cuda --arch sm_90a` and `fi-backend build --device cuda" in text
    assert "--arch sm_90a --head-dim 128` with the same FI_BACKEND_CACHE_DIR" in text


@pytest.mark.parametrize("tool", ["g++", "ninja"])
def test_missing_tool_says_what_to_install(
    cache: Path, tiny: TinyModule, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tools.shutil.which
    monkeypatch.setattr(tools.shutil, "which", lambda name: None if name == tool else found(name))
    monkeypatch.setitem(__import__("sys").modules, "ninja", None)
    with pytest.raises(BuildError, match=rf"{tool.replace('+', '.')}: not found on PATH; .*install"):
        load(tiny.spec())


def test_missing_source_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"module lost: cannot read its source .*nowhere\.cc"):
        load(ModuleSpec("lost", (str(tmp_path / "nowhere.cc"),)))


def test_paths_and_defines_with_odd_characters(cache: Path, tmp_path: Path) -> None:
    tiny = TinyModule.create(tmp_path / "a $b: 'c' \"d\"")
    assert load(tiny.spec(defines=(("FACTOR", "(1.0 + sizeof(\"$x 'y'\"))"),))).scaled(1.0) == 8.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "Bad-Name"}, "name: expected"),
        ({"sources": ()}, "sources: module m has none"),
        ({"sources": ("x.c",)}, r"expected \.cc or \.cu"),
        ({"sources": ("x.cu",)}, "needs a CUDA arch"),
        ({"arch": "sm90"}, "arch: expected"),
        ({"defines": (("A B", "1"),)}, "defines: expected"),
        ({"generated": (("../x.h", ""),)}, "generated: expected"),
    ],
)
def test_malformed_spec_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModuleSpec(**{"name": "m", "sources": ("x.cc",), **fields})  # type: ignore[arg-type]
