# SPDX-License-Identifier: Apache-2.0
"""The live table of `bench serve`; without a terminal, a line for each rate."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fi_backend.cli.shell import console

if TYPE_CHECKING:
    from types import TracebackType

    from fi_backend.benchmarks.serving.client import LoadRun

_QUIET_SECONDS = 15.0
_TABLE_WIDTH = 150  # of a pipe, which has none of its own


class ServeView:
    """Shows rows as they come and what is going on below them; a context manager, and a Watcher."""

    def __init__(self) -> None:
        self._console = console()
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, _TABLE_WIDTH)
        self._rows: list[tuple[str, Mapping[str, Any]]] = []
        self._status = "starting"
        self._said = 0.0
        self._live: Live | None = None

    def __enter__(self) -> ServeView:
        if self._console.is_terminal:
            self._live = Live(self._picture(), console=self._console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(table_of(self._rows), refresh=True)
            self._live.stop()
        elif self._rows:
            self._console.print(table_of(self._rows))

    def starting(self, backend: str, seconds: float, line: str) -> None:
        """See Watcher."""
        self._say(f"{backend}: starting the engine, {seconds:.0f} s  {line.strip()[:80]}")

    def loading(self, backend: str, rate: float, run: int, load: LoadRun, seconds: float) -> None:
        """See Watcher."""
        sent = sum(outcome.sent is not None for outcome in load.outcomes)
        done = sum(outcome.finished or outcome.error is not None for outcome in load.outcomes)
        self._say(
            f"{backend}: {rate:g}/s, run {run + 1}, {seconds:.0f} s: {sent} of {len(load.outcomes)} sent, "
            f"{done} done"
        )

    def measured(self, backend: str, row: Mapping[str, Any]) -> None:
        """See Watcher."""
        self._rows.append((backend, row))
        if self._live is None:
            self._console.print(line_of(backend, row), soft_wrap=True)
        else:
            self._live.update(self._picture())

    def _say(self, text: str) -> None:
        self._status = text
        if self._live is not None:
            self._live.update(self._picture())
        elif time.monotonic() - self._said > _QUIET_SECONDS:
            self._said = time.monotonic()
            self._console.print(Text(text), soft_wrap=True)

    def _picture(self) -> RenderableType:
        return Group(table_of(self._rows), Text(self._status, style="dim"))


def table_of(rows: list[tuple[str, Mapping[str, Any]]]) -> Table:
    """Return the table of the rows so far; brackets are 95 % bounds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("back end", no_wrap=True)
    names = ("rate", "requests", "errors", "TTFT P50", "TTFT P99, ms", "ITL P50", "ITL P99")
    for name in (*names, "goodput", "tokens/s", "lag P99", "holds"):
        table.add_column(name, justify="right", no_wrap=True)
    for backend, row in rows:
        verdict = "[green]yes[/green]" if row["holds"] else "[red]no[/red]"
        table.add_row(
            Text(backend),
            f"{row['rate']:g}",
            str(row["requests"]),
            str(row["errors"]),
            _value(row["ttft_ms"]["p50"]),
            _bounded(row["ttft_ms"]["p99"]),
            _value(row["itl_ms"]["p50"]),
            _value(row["itl_ms"]["p99"]),
            f"{row['goodput_per_s']:.4g}",
            f"{row['output_tokens_per_s']:.0f}",
            "-" if row["lag_ms"] is None else f"{row['lag_ms']['p99']:.2f}",
            verdict + (" (stopped)" if row["stopped_early"] else ""),
        )
    return table


def line_of(backend: str, row: Mapping[str, Any]) -> Text:
    """Return a row in one line."""
    lag = "-" if row["lag_ms"] is None else f"{row['lag_ms']['p99']:.2f}"
    verdict = "holds" if row["holds"] else "does not hold"
    return Text(
        f"{backend} at {row['rate']:g}/s: {verdict}; {row['requests']} requests, {row['errors']} errors; "
        f"TTFT P99 {_bounded(row['ttft_ms']['p99'])} ms; ITL P50 {_value(row['itl_ms']['p50'])}, "
        f"P99 {_bounded(row['itl_ms']['p99'])} ms; lag P99 {lag} ms"
    )


def _value(triple: list[float | None]) -> str:
    return "-" if triple[0] is None else _short(triple[0])


def _bounded(triple: list[float | None]) -> str:
    value, low, high = triple
    if value is None or low is None or high is None:
        return "-"
    return f"{_short(value)} ({_short(low)}..{_short(high)})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
