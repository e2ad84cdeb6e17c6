# SPDX-License-Identifier: Apache-2.0
"""`fi-backend stats`: what the back end really did, process by process."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fi_backend.cli.shell import InputError, console, print_json, user_input

if TYPE_CHECKING:
    from fi_backend.core.counters import AskedProcess, ProcessStats

_HELP = {
    "steps": "Batches that were planned.",
    "plans": "Plans made for them, one for each kind of layer.",
    "attention_calls": "Attention calls that ran on this back end, one by one.",
    "tokens": "Query tokens of all attention calls.",
    "appended_tokens": "Tokens written to KV caches outside replayed CUDA graphs.",
    "layers": "Attention layers built on this back end.",
    "replayed_calls": "Attention calls that ran inside replayed CUDA graphs.",
    "captured_calls": "Attention calls recorded into CUDA graphs.",
    "shared_plans": "Plans in which prefixes are read once for several requests.",
    "prefix_nodes": "Prefixes that were read once for several requests.",
    "kv_tokens_saved": "KV tokens not read again, for one KV head of one layer.",
    "kv_bytes_saved": "Bytes of K and V not read again, over all heads and layers.",
    "builds": "Native modules that were compiled.",
    "step_files": "Steps that were saved for fi-backend explain.",
}
# The table leaves the other counts out where they are 0 in every process.
_ALWAYS = ("pid", "engine", "steps", "attention_calls", "layers", "host")


def stats(
    folder: Annotated[Path, typer.Argument(help="What FI_BACKEND_STATS_DIR was set to.", metavar="DIR")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Print Prometheus' text format.")] = False,
    capture: Annotated[
        int | None,
        typer.Option(
            help="Ask the serving processes to save so many of their next steps into DIR.", metavar="STEPS"
        ),
    ] = None,
) -> None:
    """Print how many attention calls each process served, or have steps saved; it may still be running."""
    from fi_backend.core.counters import read_stats, total

    if as_json and prometheus:
        raise InputError("--prometheus: expected at most one of --json and --prometheus; got both")
    if not folder.is_dir():
        raise InputError(f"DIR: expected a folder that FI_BACKEND_STATS_DIR named; got {str(folder)!r}")
    if capture is not None:
        if prometheus:
            raise InputError("--prometheus: expected no --capture beside it; got both")
        _capture(folder, capture, as_json)
        return
    with user_input():
        found = read_stats(folder)
    if as_json:
        print_json({"processes": [asdict(each) for each in found], "total": asdict(total(found))})
    elif prometheus:
        print(prometheus_text(found), end="")
    else:
        _print_table(found, total(found))


def _capture(folder: Path, steps: int, as_json: bool) -> None:
    from fi_backend.core.counters import ask_for_steps

    with user_input(count="--capture"):
        asked = ask_for_steps(folder, steps)
    if as_json:
        print_json({"asked": [_asked(each, folder) for each in asked]})
        return
    if not asked:
        raise InputError(f"DIR: expected a process that runs and counts in {folder}; got none")
    for each in asked:
        last = "" if steps == 1 else f" to {each.numbers[-1]}"
        console().print(
            f"process {each.stats.pid} ({each.stats.engine}) saves step {each.numbers[0]}{last} as it plans: "
            f"{folder / each.files}",
            soft_wrap=True,
            markup=False,
        )
    console().print("draw one: fi-backend explain --step FILE, with --prefix what its requests share")


def _asked(each: AskedProcess, folder: Path) -> dict[str, object]:
    found = {name: getattr(each.stats, name) for name in ("host", "pid", "engine")}
    return {**found, "first": each.numbers[0], "last": each.numbers[-1], "files": str(folder / each.files)}


def prometheus_text(found: list[ProcessStats]) -> str:
    """Return the counts in Prometheus' text exposition format, one series a process."""
    lines = []
    for name, meaning in _HELP.items():
        # Layers do not grow with use: a gauge, whose name has no _total.
        kind, metric = (
            ("gauge", f"fi_backend_{name}") if name == "layers" else ("counter", f"fi_backend_{name}_total")
        )
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}"]
        for each in found:
            labels = {"host": each.host, "pid": str(each.pid), "engine": each.engine}
            shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels.items())
            lines.append(f"{metric}{{{shown}}} {getattr(each, name)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _print_table(found: list[ProcessStats], summed: ProcessStats) -> None:
    from rich.markup import escape
    from rich.table import Table

    columns = [field.name for field in fields(summed) if field.name in _ALWAYS or getattr(summed, field.name)]
    table = Table(box=None, pad_edge=False, show_footer=len(found) > 1)
    for name in columns:
        value = "total" if name == "pid" else "" if name in ("engine", "host") else str(getattr(summed, name))
        justify = "left" if name in ("pid", "engine", "host") else "right"
        # Folded where a terminal is narrow: half a number would be another one.
        table.add_column(name.replace("_", " "), footer=value, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for each in found:
        table.add_row(*(escape(str(getattr(each, name))) for name in columns))
    if not found:
        console().print("no process has written counters there")
        return
    out = console()
    if not out.is_terminal:
        out.width = max(out.width, out.measure(table, options=out.options.update(max_width=1000)).maximum)
    out.print(table)
    if summed.steps and not summed.attention_calls + summed.replayed_calls:
        console().print(
            f"[yellow]{summed.steps} steps were planned and no attention call ran: "
            "another back end served the layers[/yellow]",
            soft_wrap=True,
        )
