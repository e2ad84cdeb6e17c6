# SPDX-License-Identifier: Apache-2.0
"""`fi-backend doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from fi_backend import env
from fi_backend.cli.probes.engines import Engine, probe_engines
from fi_backend.cli.probes.host import Host, probe_host
from fi_backend.cli.probes.runtime import Runtime, probe_runtime
from fi_backend.cli.probes.tools import ModuleCache, Tool, probe_cache, probe_tools, probe_variables
from fi_backend.cli.shell import BROKEN_ENVIRONMENT, error_console, print_json


@dataclass(frozen=True)
class Report:
    """Everything that doctor found.

    problems: what keeps the package from working, with advice; notes: what may surprise.
    """

    host: Host
    runtime: Runtime
    tools: list[Tool]
    cache: ModuleCache
    engines: list[Engine]
    variables: list[dict[str, str | None]]
    problems: list[str]
    notes: list[str]

    @property
    def usable(self) -> bool:
        """Whether nothing that is needed is missing."""
        return not self.problems

    def document(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {"usable": self.usable, **asdict(self)}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what is here: devices, compilers, modules, engines, plug-ins; exit 1 if something is missing."""
    with error_console().status("looking at torch, compilers and engines"):
        report = examine()
    if as_json:
        print_json(report.document())
    else:
        from fi_backend.cli.doctor_view import print_report

        print_report(report)
    if not report.usable:
        raise typer.Exit(BROKEN_ENVIRONMENT)


def examine() -> Report:
    """Run all probes and draw the conclusions."""
    host, tools, cache = probe_host(), probe_tools(), probe_cache()
    runtime, engines = probe_runtime(), probe_engines()
    problems = [
        *_runtime_problems(runtime),
        *_build_problems(tools, cache, runtime),
        *_engine_problems(engines),
    ]
    notes = [*_notes(host, runtime, engines)]
    return Report(host, runtime, tools, cache, engines, probe_variables(), problems, notes)


def _runtime_problems(runtime: Runtime) -> list[str]:
    if runtime.torch is not None:
        return []
    remedy = (
        "install it: pip install torch"
        if "No module named 'torch'" in (runtime.error or "")
        else "reinstall it"
    )
    return [f"torch cannot be imported ({runtime.error}); {remedy}"]


def _build_problems(tools: list[Tool], cache: ModuleCache, runtime: Runtime) -> list[str]:
    if cache.problem:
        return [cache.problem]
    # Even a complete cache needs the compiler: its version is part of the modules' keys.
    needed = [tool for tool in tools if tool.needed and not (cache.jit_disabled and tool.name == "ninja")]
    problems = [f"{tool.name} is missing; {tool.advice}" for tool in needed if tool.version is None]
    if problems or not runtime.missing:
        return problems
    lacking = ", ".join(runtime.missing)
    if cache.jit_disabled:
        remedy = f"run `fi-backend build` with the same {env.CACHE_DIR.name}"
        return [f"{env.DISABLE_JIT.name}=1, and the cache lacks {lacking}; {remedy}"]
    if not cache.writable:
        remedy = f"set {env.CACHE_DIR.name} to a folder that can"
        return [f"{cache.path} cannot be written and lacks {lacking}; {remedy}"]
    return []


def _engine_problems(engines: list[Engine]) -> list[str]:
    problems = []
    for engine in engines:
        if engine.plugin in ("failed", "not registered", "excluded"):
            # A complaint may list every name that it misses; the table shows more of them.
            shown = " ".join(line.strip() for line in (engine.detail or "").splitlines()[:2])
            problems.append(f"{engine.name}: the plug-in is {engine.plugin}: {shown}")
        if engine.in_range is False and engine.plugin != "no adapter":
            problems.append(
                f"{engine.name} {engine.version} is outside the supported range {engine.supported}"
            )
    return problems


def _notes(host: Host, runtime: Runtime, engines: list[Engine]) -> list[str]:
    notes = []
    if not any(engine.version for engine in engines):
        notes.append("no serving engine is installed; the Python API works without one")
    if not {"avx2", "asimd"} & set(host.vector_units):
        notes.append("this CPU has neither AVX2 nor NEON; the kernels run in plain C++ and are slow")
    if runtime.devices_error:
        notes.append(f"CUDA devices cannot be listed: {runtime.devices_error}")
    elif runtime.devices:
        notes.append("this version has kernels for the CPU only; CUDA devices are not used")
    if runtime.missing:
        notes.append(
            f"{len(runtime.missing)} modules will be compiled on first use; "
            "`fi-backend build` does it ahead of time"
        )
    return notes
