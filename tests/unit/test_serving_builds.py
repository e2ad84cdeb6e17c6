# SPDX-License-Identifier: Apache-2.0
"""`bench serve` and the compiler: cold starts are recorded, late compilations fail the run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from aiohttp import web
from serving_bench import bench
from serving_fake import FakeServer

from fi_backend.benchmarks.serving.engines import file_name
from fi_backend.benchmarks.serving.records import read_record
from fi_backend.core import planner
from fi_backend.core.counters import CALLS, LAYERS, STEPS, Counters

MODULES = ("cpu_planner", "cpu_attention")


class Compiling(FakeServer):
    """Compiles MODULES on its start if the cache is empty, and `late` once `after` requests have come."""

    late: tuple[str, ...] = ()
    after = 0

    def _count(self) -> None:
        self._counters = Counters(self._stats)
        cache = Path(self.environment["FI_BACKEND_CACHE_DIR"])
        if not any(cache.glob("*")):
            self._counters.build(MODULES)
            for name in MODULES:
                (cache / name).mkdir(parents=True)
        for index, amount in ((LAYERS, self.layers), (STEPS, 5), (CALLS, 5 * self.layers)):
            self._counters.add(index, amount)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if self.late and len(self.bodies) >= self.after:
            self._counters.build(self.late)
            self.late = ()
        return await super()._completions(request)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder for what servers compile; this process has its planner already."""
    planner.module()
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_cold_start_stands_beside_a_warm_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    """The same back end twice: with the cache of the machine, and with an empty folder in its place."""
    (cache / "cpu_planner").mkdir(parents=True)
    empty = tmp_path / "empty"
    backends = ("--backend", "fi", "--backend", f"fi+FI_BACKEND_CACHE_DIR={empty}")
    result = bench(monkeypatch, tmp_path / "out", *backends, "--rates", "40", server=Compiling)
    assert result.exit_code == 0, result.output
    known, cold = read_record(tmp_path / "out")["backends"]
    assert known["builds"] == {"before_ready": 0, "after_ready": []}
    assert cold["builds"] == {"before_ready": len(MODULES), "after_ready": []}
    assert cold["variables"] == {"FI_BACKEND_CACHE_DIR": str(empty)}
    assert known["ready_s"] >= 0
    assert cold["ready_s"] >= 0
    assert sorted(path.name for path in empty.iterdir()) == sorted(MODULES)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{len(MODULES)} compiled" in page


@pytest.mark.parametrize("after", [0, 2 + 2 * 11 - 1], ids=["warm-up", "last request"])
def test_what_is_compiled_late_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path, after: int
) -> None:
    options = ("--backend", "fi", "--rates", "40")
    result = bench(
        monkeypatch, tmp_path / "out", *options, server=Compiling, late=("cpu_attention_fp8",), after=after
    )
    assert result.exit_code == 1
    [entry] = read_record(tmp_path / "out")["backends"]
    assert entry["builds"] == {"before_ready": 2, "after_ready": ["cpu_attention_fp8"]}
    words = "expected nothing to be compiled once the engine is ready; got cpu_attention_fp8"
    assert words in entry["failed"]
    assert words in result.stdout.replace("\n", " ")
    assert words in (tmp_path / "out" / "report.html").read_text()
    assert len(entry["points"]) == 1, "what was measured is kept"


def test_long_folders_make_names_that_files_may_have() -> None:
    assert file_name("fi+FI_BACKEND_CACHE_DIR=/a b/c") == "fi_FI_BACKEND_CACHE_DIR=_a_b_c"
    names = {file_name(f"fi+FI_BACKEND_CACHE_DIR=/{'long/' * 80}{end}") for end in "ab"}
    assert len(names) == 2
    assert all(len(name) == 100 for name in names)
