# SPDX-License-Identifier: Apache-2.0
"""Compilers and the cache of compiled modules."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace

from fi_backend import env
from fi_backend.cli.modules import cached_modules
from fi_backend.core.jit import compiler, toolkit, tools
from fi_backend.errors import BuildError


@dataclass(frozen=True)
class Tool:
    """One build tool; advice says what to install when path is None; origin: how nvcc was found."""

    name: str
    needed: bool
    path: str | None
    version: str | None
    advice: str | None
    origin: str | None = None


@dataclass(frozen=True)
class ModuleCache:
    """The folder of compiled modules. problem: why it cannot be used, or None."""

    path: str | None
    writable: bool
    modules: tuple[str, ...]
    jit_disabled: bool
    problem: str | None


def probe_tools() -> list[Tool]:
    """Look for g++, ninja and nvcc, in the way in which a build finds them."""
    nvcc = _tool("nvcc", False, lambda: toolkit.find_toolkit().nvcc)
    if nvcc.path is not None:
        nvcc = replace(nvcc, origin=toolkit.find_toolkit().origin)
    return [
        _tool("g++", True, lambda: compiler.toolchain("cpu").cxx),
        _tool("ninja", True, tools.ninja_binary),
        nvcc,
    ]


def _tool(name: str, needed: bool, find: Callable[[], str]) -> Tool:
    try:
        path = find()
    except BuildError as error:
        # The text is "tool: not found on PATH; what to install".
        found, _, remedy = str(error).partition("; ")
        return Tool(name, needed, None, None, remedy or found)
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Tool(name, needed, path, None, f"`{path} --version` does not run: {error}")
    if run.returncode != 0:
        return Tool(name, needed, path, None, f"`{path} --version` fails: {run.stderr.strip()[:200]}")
    return Tool(name, needed, path, _version(run.stdout), None)


def _version(text: str) -> str | None:
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text) or re.search(r"\b(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def probe_cache() -> ModuleCache:
    """Look at the module cache without creating it."""
    try:
        folder, disabled = env.cache_dir(), env.jit_disabled()
    except ValueError as error:
        return ModuleCache(None, False, (), False, str(error))
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(existing, os.W_OK | os.X_OK)
    modules = tuple(path.name for path in cached_modules(folder))
    problem = None
    if not writable and not modules:
        remedy = f"set {env.CACHE_DIR.name} to a folder that can"
        problem = f"{existing} cannot be written and holds no modules; {remedy}"
    return ModuleCache(str(folder), writable, modules, disabled, problem)


def probe_variables() -> list[dict[str, str | None]]:
    """Return our environment variables: name, value or None, default, meaning."""
    environment = env.child_environment()
    return [
        {
            "name": each.name,
            "value": environment.get(each.name),
            "default": each.default,
            "meaning": each.meaning,
        }
        for each in env.VARIABLES
    ]


def variable_problems() -> list[str]:
    """Return what is wrong with our environment variables, but for those of the cache: see probe_cache()."""
    problems = []
    for read in (env.debug, env.stats_dir, env.without):
        try:
            read()
        except ValueError as error:
            problems.append(str(error))
    return problems
