# SPDX-License-Identifier: Apache-2.0
"""`fi-backend bench serve` and `bench report`: the request rate that a serving engine holds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fi_backend.cli import serve_options as options
from fi_backend.cli.shell import BROKEN_ENVIRONMENT, InputError, console, user_input

if TYPE_CHECKING:
    from fi_backend.benchmarks.serving.model import ServedModel
    from fi_backend.benchmarks.serving.session import Settings


def serve(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="More arguments of the server, after --.", metavar="-- ARGS")
    ] = None,
    engine: Annotated[str, typer.Option(help="vllm or sglang.")] = "vllm",
    model: Annotated[
        str, typer.Option(help="Folder, name, copy-llama, or random weights: dummy:8b, dummy:tiny.")
    ] = "",
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention back ends: NAME or NAME+VARIABLE=VALUE; repeated or separated by commas."
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="sharegpt, uniform, bursty, shared-prefix (with :option=value,...) or a file.")
    ] = "sharegpt",
    slo_ttft_p99: Annotated[str, typer.Option(help="Objective of the time to first token.")] = "200ms",
    slo_itl_p50: Annotated[str | None, typer.Option(help="Objective of the time between tokens.")] = None,
    slo_itl_p99: Annotated[str | None, typer.Option(help="Objective of the time between tokens.")] = None,
    rates: Annotated[
        str, typer.Option(help="Requests a second, separated by commas; without it the highest is searched.")
    ] = "",
    start_rate: Annotated[float, typer.Option(help="First rate of the search.")] = 4.0,
    max_rate: Annotated[float, typer.Option(help="Highest rate of the search.")] = 256.0,
    tolerance: Annotated[
        float, typer.Option(help="Where the search ends: lowest rate not held / held - 1.")
    ] = 0.05,
    requests: Annotated[int, typer.Option(help="Requests of a run.")] = 200,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of arrivals in a run, instead of --requests.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs of each rate, each with a seed of its own.")] = 3,
    warm_up: Annotated[int, typer.Option(help="Requests before the first rate, which do not count.")] = 16,
    seed: Annotated[int, typer.Option(help="Of lengths, times and tokens.")] = 0,
    max_len: Annotated[int, typer.Option(help="Tokens of the longest prompt and answer together.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ctas: Annotated[
        int | None, typer.Option(help="CTAs over which sampled steps are balanced (default: the device's).")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Seconds that the engine may take to start.")] = 900.0,
    out: Annotated[Path, typer.Option(help="Folder for report, records and logs.")] = Path("serving"),
) -> None:
    """Load a real engine on one attention back end after another and find the rate that it holds."""
    options.check_engine(engine)
    for option, value, low in (
        *(("--requests", requests, 2), ("--runs", runs, 1), ("--max-len", max_len, 2)),
        *(("--warm-up", warm_up, 1), ("--ctas", 1 if ctas is None else ctas, 1), ("--seed", seed, 0)),
    ):
        if value < low:
            raise InputError(f"{option}: expected >= {low}; got {value}")
    for name, number in (("--start-rate", start_rate), ("--tolerance", tolerance), ("--duration", duration)):
        if number is not None and not 0 < number < float("inf"):
            raise InputError(f"{name}: expected > 0; got {number}")
    if max_rate < start_rate:
        raise InputError(f"--max-rate: expected >= --start-rate {start_rate:g}; got {max_rate:g}")
    from fi_backend.benchmarks.serving.session import Settings

    settings = Settings(
        rates=options.rates(rates),
        requests=requests,
        runs=runs,
        seed=seed,
        objectives=options.objectives((slo_ttft_p99, slo_itl_p50, slo_itl_p99)),
        duration=duration,
        low=min(start_rate, 0.25),
        high=max_rate,
        start=start_rate,
        tolerance=tolerance,
        warm_up=warm_up,
        start_timeout=start_timeout,
    )
    cpu = options.runs_on_cpu(device)
    names = [name.strip() for text in backend or ["fi"] for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise InputError(f"--backend: expected each back end once; got {', '.join(names) or 'none'}")
    status = _run(
        engine=engine,
        model=model or ("dummy:tiny" if cpu else "dummy:8b"),
        backends=names,
        workload=workload,
        settings=settings,
        max_len=max_len,
        cpu=cpu,
        ctas=ctas or options.device_ctas(cpu),
        arguments=arguments or [],
        out=out,
    )
    if status:
        raise typer.Exit(status)


def _run(
    *,
    engine: str,
    model: str,
    backends: list[str],
    workload: str,
    settings: Settings,
    max_len: int,
    cpu: bool,
    ctas: int,
    arguments: list[str],
    out: Path,
) -> int:
    """Measure, keep record and report after every rate; return the exit code: whether anything failed."""
    from fi_backend.benchmarks.serving.engines import ENGINES, parse_backend
    from fi_backend.benchmarks.serving.model import prepare_model
    from fi_backend.benchmarks.serving.records import write_record, write_whole
    from fi_backend.benchmarks.serving.report import render
    from fi_backend.benchmarks.serving.session import Session
    from fi_backend.benchmarks.serving.workload import parse_workload
    from fi_backend.cli.serve_balance import balance_of
    from fi_backend.cli.serve_interrupt import Interrupted, interruptible
    from fi_backend.cli.serve_view import ServeView

    with user_input(backend="--backend", workload="--workload"):
        chosen = [parse_backend(text) for text in backends]
        asked = parse_workload(workload, max_len=max_len)
    options.output_folder(out)
    status = 0
    record: dict[str, Any] = {"backends": []}
    entries: dict[str, Any] = {}

    def keep(entry: Mapping[str, Any]) -> None:
        entries[entry["name"]] = entry
        record["backends"] = list(entries.values())
        write_record(out, record)
        write_whole(out / "report.html", render([record]))

    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="fi-serve-") as made, ServeView() as view:
            with user_input(model="--model"):
                served = prepare_model(model, Path(made))
            session = Session(
                kind=ENGINES[engine],
                model=served,
                workload=asked,
                settings=settings,
                folder=out,
                max_len=max_len,
                cpu=cpu,
                arguments=arguments,
                watcher=view,
                examine=balance_of(served, cpu=cpu, num_ctas=ctas),
                kv_element_bytes=options.kv_element_bytes(arguments),
            )
            record = _record(engine, served, workload, settings, max_len, arguments, cpu)
            for each in chosen:
                session.measure(each, keep)
    except Interrupted as stop:
        status = stop.exit_code
    for entry in record["backends"]:
        _print_result(entry)
    if entries:
        console().print(f"report: {out / 'report.html'}", soft_wrap=True, markup=False)
    failed = any(
        entry["failed"] or any(row["errors"] for row in entry["points"]) for entry in record["backends"]
    )
    return status or (BROKEN_ENVIRONMENT if failed else 0)


def _record(
    engine: str,
    served: ServedModel,
    workload: str,
    settings: Settings,
    max_len: int,
    arguments: list[str],
    cpu: bool,
) -> dict[str, Any]:
    import torch

    from fi_backend.benchmarks.record import gpu_provenance, provenance
    from fi_backend.benchmarks.serving.records import FORMAT
    from fi_backend.cli.probes.host import cpu_name

    told = asdict(settings)
    wanted = told.pop("objectives")
    where = provenance(cpu_name())
    if not cpu and torch.cuda.is_available():
        where = gpu_provenance(torch.device("cuda"))
    return {
        "format": FORMAT,
        **where,
        "engine": engine,
        "model": served.shown,
        "workload": workload,
        "settings": {**told, "max_len": max_len, "server_arguments": arguments},
        "objectives": wanted,
        "backends": [],
    }


def _print_result(entry: Mapping[str, Any]) -> None:
    from rich.markup import escape

    name = escape(entry["name"])
    if entry["failed"]:
        console().print(f"[red]{name} failed:[/red] {escape(entry['failed'][:3000])}", soft_wrap=True)
        return
    found = entry["sustained"] or {}
    rate, lost = found.get("rate"), found.get("failed")
    held = "holds no rate that was tried" if rate is None else f"holds {rate:g} requests/s"
    more = "" if lost is None else f"; not {lost:g}"
    built = entry["builds"]["before_ready"]
    compiled = f", having compiled {built} modules" if built else ""
    ready = f"engine ready after {entry['ready_s']:g} s{compiled}"
    console().print(f"{name}: {held}{more}; {ready}", soft_wrap=True)
    if late := [f"{row['rate']:g}" for row in entry["points"] if row["client_late"]]:
        console().print(
            f"[yellow]{name}: at {', '.join(late)}/s the client itself was late by more than a tenth of an "
            "objective (see lag); give it a core of its own[/yellow]",
            soft_wrap=True,
        )


def report(
    records: Annotated[list[Path], typer.Argument(help="Records, or the folders that hold them.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Put the records of several `bench serve` runs into one report, a section for each comparison."""
    from fi_backend.benchmarks.serving.merge import Source, merge
    from fi_backend.benchmarks.serving.records import read_record
    from fi_backend.benchmarks.serving.report import render

    with user_input():
        found = merge([Source(path, read_record(path)) for path in records])
    try:
        out.write_text(render(found))
    except OSError as error:
        raise InputError(
            f"--out: expected a file that can be written; got {out} ({error.strerror})"
        ) from error
    console().print(f"report: {out}", soft_wrap=True, markup=False)
