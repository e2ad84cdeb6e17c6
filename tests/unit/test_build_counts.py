# SPDX-License-Identifier: Apache-2.0
"""Compilations are counted and named where the calls are counted, so that a late one can be seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_module import TinyModule

from fi_backend.core import counters
from fi_backend.core.counters import Counters, read_builds, read_stats, total
from fi_backend.core.jit import build, build_all, load
from fi_backend.errors import BuildError


@pytest.fixture
def stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FI_BACKEND_DISABLE_JIT", raising=False)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(counters, "_current", Counters(tmp_path / "stats"))
    return tmp_path / "stats"


def test_what_the_cache_lacks_is_counted_once(stats: Path, tmp_path: Path) -> None:
    tiny = TinyModule.create(tmp_path / "source")
    build_all([tiny.spec(name="one"), tiny.spec(name="two")])
    assert total(read_stats(stats)).builds == 2
    assert read_builds(stats) == ["one", "two"]
    load(tiny.spec(name="one"))
    assert total(read_stats(stats)).builds == 2
    load(tiny.spec(name="one", offset="9.0"))
    assert read_builds(stats) == ["one", "two", "one"]


def test_a_build_that_fails_took_its_time_too(stats: Path, tmp_path: Path) -> None:
    tiny = TinyModule.create(tmp_path / "source")
    (tiny.folder / "kernel.cc").write_text("int broken() { return undeclared_name; }\n")
    with pytest.raises(BuildError):
        load(tiny.spec())
    assert (total(read_stats(stats)).builds, read_builds(stats)) == (1, [tiny.spec().name])


def test_names_of_an_earlier_process_of_this_number_are_forgotten(stats: Path) -> None:
    counters.counters().build(["old"])
    again = Counters(stats)
    assert (again.snapshot().builds, read_builds(stats)) == (0, [])
    Counters().build(["nowhere"])
    assert read_builds(stats) == []
