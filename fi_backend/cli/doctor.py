# SPDX-License-Identifier: Apache-2.0
"""`fi-backend doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fi_backend import env
from fi_backend.cli import serve_options
from fi_backend.cli.probes.engines import Engine, probe_engines
from fi_backend.cli.probes.host import Host, probe_host
from fi_backend.cli.probes.runtime import Runtime, probe_runtime
from fi_backend.cli.probes.tools import (
    ModuleCache,
    Tool,
    probe_cache,
    probe_tools,
    probe_variables,
    variable_problems,
)
from fi_backend.cli.shell import BROKEN_ENVIRONMENT, error_console, print_json

if TYPE_CHECKING:
    from fi_backend.benchmarks.serving.known_answer import Served

_SHOWN = 6


@dataclass(frozen=True)
class Report:
    """Everything that doctor found.

    problems: what keeps the package from working, with advice; notes: what may surprise. served: what came
    of the request with a known answer, if one was asked for.
    """

    host: Host
    runtime: Runtime
    tools: list[Tool]
    cache: ModuleCache
    engines: list[Engine]
    variables: list[dict[str, str | None]]
    problems: list[str]
    notes: list[str]
    served: Served | None = None

    @property
    def usable(self) -> bool:
        """Whether nothing that is needed is missing."""
        return not self.problems

    def document(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return {"usable": self.usable, **asdict(self)}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    engine: Annotated[
        str | None, typer.Option(help="Also serve one request with a known answer: vllm or sglang.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where --engine serves: auto, cpu or cuda.")] = "auto",
) -> None:
    """Show what is here: devices, compilers, modules, engines, plug-ins; exit 1 if something is missing."""
    if engine is not None:
        serve_options.check_engine(engine, client=False)
    cpu = engine is None or serve_options.runs_on_cpu(device)
    with error_console().status("looking at torch, compilers and engines"):
        report = examine()
    if engine is not None and report.usable:
        report = _with_answer(report, engine, cpu)
    if as_json:
        print_json(report.document())
    else:
        from fi_backend.cli.doctor_view import print_report

        print_report(report)
    if not report.usable:
        raise typer.Exit(BROKEN_ENVIRONMENT)


def _with_answer(report: Report, engine: str, cpu: bool) -> Report:
    """Serve a request whose answer is known; a failure becomes a problem."""
    from fi_backend.benchmarks.serving.known_answer import serve_known_answer

    with error_console().status(f"starting {engine}") as status:
        served = serve_known_answer(
            engine,
            cpu=cpu,
            progress=lambda seconds, line: status.update(f"starting {engine}, {seconds:.0f} s  {line[:80]}"),
        )
    problems = [] if served.ok else [f"{engine} did not serve the known answer: {served.detail}"]
    return replace(report, served=served, problems=[*report.problems, *problems])


def examine() -> Report:
    """Run all probes and draw the conclusions."""
    host, tools, cache = probe_host(), probe_tools(), probe_cache()
    runtime, engines = probe_runtime(), probe_engines()
    problems = [
        *_runtime_problems(runtime),
        *_build_problems(tools, cache, runtime),
        *_device_problems(runtime, tools),
        *_engine_problems(engines),
        *variable_problems(),
    ]
    notes = [*_notes(host, runtime, tools, cache, engines)]
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
    if _serves_as_is(runtime):
        return []
    lacking = _lacking(runtime)
    if cache.jit_disabled and lacking:
        remedy = f"run {_build_commands(runtime)} with the same {env.CACHE_DIR.name}"
        return [f"{env.DISABLE_JIT.name}=1, and the cache lacks {_names(lacking)}; {remedy}"]
    problems = [f"{tool.name} is missing; {tool.advice}" for tool in _missing_tools(tools, runtime)]
    if not problems and lacking and not cache.writable:
        remedy = f"set {env.CACHE_DIR.name} to a folder that can"
        return [f"{cache.path} cannot be written and lacks {_names(lacking)}; {remedy}"]
    return problems


def _serves_as_is(runtime: Runtime) -> bool:
    """Whether the cache serves without any tool, whoever filled it."""
    if runtime.torch is None:
        return False
    if not runtime.devices:
        return not runtime.missing
    # A cache made for one model holds planner, operators and an attention module, not the whole list.
    return "planner" in runtime.ready and all(each.ready > 2 for each in runtime.coverage)


def _missing_tools(tools: list[Tool], runtime: Runtime) -> list[Tool]:
    wanted = {"g++", "ninja", *(["nvcc"] if runtime.devices else [])}
    return [tool for tool in tools if tool.name in wanted and tool.version is None]


def _lacking(runtime: Runtime) -> list[str]:
    """The modules of this version that the devices here would need and the cache lacks."""
    cuda = [name for each in runtime.coverage for name in each.missing] if runtime.devices else []
    return [*runtime.missing, *cuda]


def _names(modules: list[str]) -> str:
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    return ", ".join(modules[:_SHOWN]) + more


def _build_commands(runtime: Runtime) -> str:
    archs = [each.arch for each in runtime.coverage if each.missing] if runtime.devices else []
    commands = ["`fi-backend build`"] if runtime.missing else []
    return " and ".join([*commands, *(f"`fi-backend build --device cuda --arch {arch}`" for arch in archs)])


def _device_problems(runtime: Runtime, tools: list[Tool]) -> list[str]:
    problems = [
        f"{device['name']} has compute capability {device['capability']}; the kernels need 8.0 or newer"
        for device in runtime.devices
        if device["arch"] is None
    ]
    nvcc = next((tool.version for tool in tools if tool.name == "nvcc"), None)
    driver = runtime.driver_cuda
    if runtime.devices and nvcc and driver and int(nvcc.split(".")[0]) > int(driver.split(".")[0]):
        # Its modules hold their own CUDA runtime, which refuses an older driver.
        problems.append(
            f"nvcc {nvcc} compiles for a newer driver than this one (CUDA {driver}); update the driver, or "
            "set CUDA_HOME to an older toolkit"
        )
    return problems


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


def _notes(
    host: Host, runtime: Runtime, tools: list[Tool], cache: ModuleCache, engines: list[Engine]
) -> list[str]:
    notes = []
    if not any(engine.version for engine in engines):
        notes.append("no serving engine is installed; the Python API works without one")
    if not {"avx2", "asimd"} & set(host.vector_units):
        notes.append("this CPU has neither AVX2 nor NEON; the kernels run in plain C++ and are slow")
    if runtime.devices_error:
        notes.append(f"CUDA devices cannot be listed: {runtime.devices_error}")
    if lacking := _lacking(runtime):
        absent = ", ".join(tool.name for tool in _missing_tools(tools, runtime))
        if absent or cache.jit_disabled:
            reason = f"without {absent}" if absent else f"while {env.DISABLE_JIT.name}=1"
            notes.append(f"{len(lacking)} modules are not in the cache and cannot be compiled {reason}")
        else:
            notes.append(
                f"{len(lacking)} modules will be compiled on first use; "
                f"{_build_commands(runtime)} does it ahead of time"
            )
    return notes
