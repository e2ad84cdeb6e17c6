# SPDX-License-Identifier: Apache-2.0
"""Several processes and one cache: one build, no half modules, read-only folders, one OpenMP runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_module import RecordingCompiler, TinyModule, kill_session

from fi_backend.core.jit import cache as jit_cache


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModule:
    return TinyModule.create(tmp_path / "source")


def finished(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=600)
    return process.returncode, out.strip(), err


def test_processes_that_need_a_module_at_once_build_it_once(tiny: TinyModule, tmp_path: Path) -> None:
    compiler = RecordingCompiler.create(tmp_path / "bin")
    compiler.stall.touch()  # holds the first build until every process has asked for the module
    processes = [tiny.start(tmp_path / "cache", search_path=compiler.folder) for _ in range(3)]
    first_lines = sorted(process.stderr.readline() for process in processes if process.stderr)
    assert "compiling tiny" in first_lines[0]
    assert all("waiting for another process that compiles tiny" in line for line in first_lines[1:])
    compiler.stall.unlink()
    results = [finished(process) for process in processes]
    assert [(code, out) for code, out, _ in results] == [(0, "20.5")] * 3, results
    assert compiler.compilations() == 2  # one for each source
    assert sum("compiled tiny" in err for *_, err in results) == 1


def test_a_killed_build_leaves_no_module_and_blocks_nobody(tiny: TinyModule, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiler = RecordingCompiler.create(tmp_path / "bin")
    compiler.stall.touch()
    process = tiny.start(cache, search_path=compiler.folder)
    deadline = time.monotonic() + 600
    while compiler.compilations() == 0:
        assert time.monotonic() < deadline, "the build did not start"
        time.sleep(0.05)
    kill_session(process)
    assert not list(cache.glob("tiny-*"))
    [left] = cache.glob(".build-*")
    os.utime(left, (0, 0))  # as if it had been left long ago

    compiler.stall.unlink()
    code, out, err = finished(tiny.start(cache, search_path=compiler.folder))
    assert (code, out) == (0, "20.5"), err
    assert len(list(cache.glob("tiny-*"))) == 1
    assert not list(cache.glob(".build-*"))


def test_installing_twice_keeps_the_first_and_mends_an_empty_folder(tmp_path: Path) -> None:
    def built(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "module.so").write_text(name)
        return folder

    target = tmp_path / "target"
    target.mkdir()
    (target / "rubbish").touch()
    jit_cache.install(built("first"), target)
    jit_cache.install(built("second"), target)
    assert (target / "module.so").read_text() == "first"


def test_locks_that_the_file_system_lacks_are_done_without(
    tiny: TinyModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(jit_cache.FileLock, "acquire", refuse)
    with jit_cache.locked([tmp_path / "cache" / "module-key"]):
        assert (tmp_path / "cache").is_dir()


def test_read_only_cache_serves_what_it_has_and_names_itself_otherwise(
    tiny: TinyModule, tmp_path: Path
) -> None:
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        # Root writes everywhere; without this capability it obeys the permission bits.
        if shutil.which("setpriv") is None:
            pytest.skip("running as root without setpriv (util-linux)")
        prefix = ("setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override")
    warm, empty = tmp_path / "warm", tmp_path / "empty"
    assert finished(tiny.start(warm))[0] == 0
    empty.mkdir()
    for folder in (warm, empty):
        folder.chmod(0o555)
    try:
        code, out, err = finished(tiny.start(warm, prefix=prefix))
        assert (code, out) == (0, "20.5"), err
        code, out, err = finished(tiny.start(empty, prefix=prefix))
        assert code == 1
        assert f"BuildError: cache folder {empty} cannot be written" in err
        assert "FI_BACKEND_CACHE_DIR" in err
    finally:
        for folder in (warm, empty):
            folder.chmod(0o755)


OPENMP = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tiny_module import TinyModule
{first}
from fi_backend.core.jit import load
module = load(TinyModule(Path({folder!r})).spec())
import torch
torch.set_num_threads(3)
assert module.threads() == 3, module.threads()
torch.set_num_threads(1)
assert module.threads() == 1, module.threads()
runtimes = {{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line}}
assert len(runtimes) == 1, runtimes
"""


@pytest.mark.parametrize(
    "first", ["import torch", "from fi_backend.core.jit.openmp import ensure_runtime; ensure_runtime()"]
)
def test_module_and_torch_share_one_openmp_runtime(tiny: TinyModule, tmp_path: Path, first: str) -> None:
    here = Path(__file__).resolve().parent
    program = OPENMP.format(path=[str(here), str(here.parents[1])], folder=str(tiny.folder), first=first)
    environment = {**os.environ, "FI_BACKEND_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
