# SPDX-License-Identifier: Apache-2.0
"""The processor time that a build may take: ten seconds of two cores."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fi_backend.core.jit.compiler import toolchain

CORES, LIMIT_S = 2, 10.0
# What compiling the source below takes on the machine that the limit was set on.
YARDSTICK_S = 3.0
YARDSTICK = """
#include <map>
#include <regex>
#include <string>
std::map<std::string, bool> found(const std::string& text, const std::map<std::string, std::string>& all) {
  std::map<std::string, bool> result;
  for (const auto& [name, pattern] : all) result[name] = std::regex_search(text, std::regex(pattern));
  return result;
}
"""
T = TypeVar("T")


def measured(build: Callable[[], T]) -> tuple[T, float]:
    """Return what `build` returns, and the processor time of the processes that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    made = build()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return made, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def expect_cheap(name: str, used: float, folder: Path) -> None:
    """Assert that a build took what it may; where it took more, what it may on a machine as slow as this.

    Processors differ, and the two threads of a core slow each other.
    """
    limit = CORES * LIMIT_S
    if used >= limit:
        source = folder / "yardstick.cc"
        source.write_text(YARDSTICK)
        command = [toolchain("cpu").cxx, "-std=c++20", "-O2", "-c", str(source), "-o", f"{source}.o"]
        _, yardstick = measured(lambda: subprocess.run(command, check=True))
        limit *= max(1.0, yardstick / YARDSTICK_S)
    assert 0.1 < used < limit, f"{used:.1f} s of processor time for {name}, expected up to {limit:.1f} s"
