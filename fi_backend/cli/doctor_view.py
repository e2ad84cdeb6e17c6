# SPDX-License-Identifier: Apache-2.0
"""The report of `doctor` for people."""

from __future__ import annotations

from collections import Counter

from rich.table import Table
from rich.text import Text

from fi_backend.cli.doctor import Report
from fi_backend.cli.probes.engines import Engine
from fi_backend.cli.shell import console

_DETAIL_LINES = 6
_GOOD, _BAD, _NEUTRAL = "[green]✓[/green]", "[red]✗[/red]", "[dim]–[/dim]"


def print_report(report: Report) -> None:
    """Print a table of what was found, then problems with advice, then notes."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for mark, name, text in [
        *_machine(report),
        *_building(report),
        *_engines(report),
        *_served(report),
        *_variables(report),
    ]:
        table.add_row(mark, name, Text(text))
    console().print(table)
    for problem in report.problems:
        console().print(Text(f"problem: {problem}", style="red"), soft_wrap=True)
    for note in report.notes:
        console().print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    verdict = "[green]usable[/green]" if report.usable else "[red]not usable yet[/red]"
    console().print(f"fi_backend is {verdict}.")


_Row = tuple[str, str, str]


def _machine(report: Report) -> list[_Row]:
    host, runtime = report.host, report.runtime
    units = ", ".join(host.vector_units) or "none that the kernels use"
    rows = [
        (_GOOD, "fi_backend", f"{host.package} in {host.location}"),
        (_GOOD, "Python", host.python),
        (_GOOD, "system", host.system),
        (_GOOD, "CPU", f"{host.cpu}, {host.cores} cores; {units}"),
    ]
    if runtime.torch is None:
        return [*rows, (_BAD, "torch", str(runtime.error))]
    rows.append((_GOOD, "torch", f"{runtime.torch}, {runtime.threads} threads"))
    for device in runtime.devices:
        target = device["arch"] or "too old"
        text = f"{device['name']}, compute capability {device['capability']} ({target}), "
        rows.append((_GOOD if device["arch"] else _BAD, "CUDA device", f"{text}{device['memory_gib']} GiB"))
    if not runtime.devices:
        rows.append((_NEUTRAL, "CUDA devices", runtime.devices_error or "none"))
    if runtime.torch_cuda or runtime.driver_cuda:
        text = f"{runtime.torch_cuda or 'none'} of torch, {runtime.driver_cuda or 'none'} of the driver"
        rows.append((_NEUTRAL, "CUDA", text))
    return rows


def _building(report: Report) -> list[_Row]:
    rows = []
    for tool in report.tools:
        if tool.version is None:
            mark = _BAD if tool.needed else _NEUTRAL
            rows.append(
                (mark, tool.name, f"not found; {tool.advice}" if tool.path is None else str(tool.advice))
            )
        else:
            origin = f", from {tool.origin}" if tool.origin else ""
            rows.append((_GOOD, tool.name, f"{tool.version} ({tool.path}{origin})"))
    cache, runtime = report.cache, report.runtime
    if cache.path is None:
        return [*rows, (_BAD, "module cache", str(cache.problem))]
    access = "writable" if cache.writable else "read-only"
    state = f"{cache.path} ({access}), {len(cache.modules)} modules"
    if runtime.torch is not None:
        state += f"; of this version {len(runtime.ready)} of {len(runtime.ready) + len(runtime.missing)}"
    for each in runtime.coverage:
        state += f"\n{each.arch}: {each.ready} of {each.ready + len(each.missing)} shipped modules"
    # A folder is "name-key"; one name has several keys when sources or compilers changed.
    names = Counter(folder.rpartition("-")[0] for folder in cache.modules)
    state += "".join(f"\n{name}" + (f" (×{count})" if count > 1 else "") for name, count in names.items())
    return [*rows, (_BAD if cache.problem else _GOOD, "module cache", state)]


def _engines(report: Report) -> list[_Row]:
    return [row for engine in report.engines for row in _engine(engine)]


def _engine(engine: Engine) -> list[_Row]:
    supported = f"supported: {engine.supported}" if engine.supported else "supported range unknown"
    if engine.version is None:
        return [(_NEUTRAL, engine.name, f"not installed ({supported})")]
    mark = _BAD if engine.in_range is False else _GOOD
    rows = [
        (mark, engine.name, f"{engine.version} as {engine.distribution} in {engine.location} ({supported})")
    ]
    mark = {"loaded": _GOOD, "no adapter": _NEUTRAL}.get(engine.plugin, _BAD)
    lines = (engine.detail or "").splitlines()
    more = [f"  … {len(lines) - _DETAIL_LINES} more"] if len(lines) > _DETAIL_LINES else []
    detail = "\n".join(lines[:_DETAIL_LINES] + more)
    return [*rows, (mark, f"{engine.name} plug-in", f"{engine.plugin}: {detail}")]


def _served(report: Report) -> list[_Row]:
    served = report.served
    if served is None:
        return []
    times = (
        "" if served.answer_s is None else f"; ready after {served.ready_s} s, answer in {served.answer_s} s"
    )
    detail = served.detail.splitlines()[0] if served.detail else ""
    return [(_GOOD if served.ok else _BAD, f"{served.engine} serves", f"{detail}{times}")]


def _variables(report: Report) -> list[_Row]:
    return [
        (
            _NEUTRAL,
            str(each["name"]),
            each["value"] if each["value"] is not None else f"unset (default: {each['default']})",
        )
        for each in report.variables
    ]
