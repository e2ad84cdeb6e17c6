# SPDX-License-Identifier: Apache-2.0
"""Measures engines: one back end after another is started, warmed up, loaded rate by rate and stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fi_backend.benchmarks.serving import counted, engines, records
from fi_backend.benchmarks.serving.client import LoadRun, run_load
from fi_backend.benchmarks.serving.engines import Backend, EngineKind
from fi_backend.benchmarks.serving.model import ServedModel
from fi_backend.benchmarks.serving.prompts import Prompts
from fi_backend.benchmarks.serving.protocols import Request
from fi_backend.benchmarks.serving.search import held_below, highest_rate
from fi_backend.benchmarks.serving.server import Server, ServerError
from fi_backend.benchmarks.serving.summary import (
    Measured,
    Objective,
    allowed_late,
    decode_kv_bytes,
    summarize,
)
from fi_backend.benchmarks.serving.workload import Workload
from fi_backend.core.counters import ProcessStats

_WARM_UP = 1 << 30  # a part of the salt that no run has


@dataclass(frozen=True)
class Settings:
    """How rates are measured.

    rates: a fixed grid, or empty for the search between `low` and `high` from `start`. requests: of each
    run, or seconds of arrivals where `duration` is given. warm_up: requests before the first rate.
    timeout: seconds for one request. start_timeout: seconds for the engine to be ready.
    """

    rates: tuple[float, ...]
    requests: int
    runs: int
    seed: int
    objectives: tuple[Objective, ...]
    duration: float | None = None
    low: float = 0.25
    high: float = 256.0
    start: float = 4.0
    tolerance: float = 0.05
    warm_up: int = 16
    timeout: float = 600.0
    start_timeout: float = 900.0


class Watcher(Protocol):
    """Is told what happens, for the live table."""

    def starting(self, backend: str, seconds: float, line: str) -> None:
        """The engine has been starting for so long; the last line of its log."""

    def loading(self, backend: str, rate: float, run: int, load: LoadRun, seconds: float) -> None:
        """A run is under way."""

    def measured(self, backend: str, row: Mapping[str, Any]) -> None:
        """A rate is done."""


@dataclass
class Session:
    """One engine, model and workload under several back ends.

    folder: for logs, counters and records. arguments: of the server, beyond the attention back end's.
    examine: adds to a row what can be learned from its runs, and from whether they read prefixes together;
    balance of steps, for one.
    """

    kind: EngineKind
    model: ServedModel
    workload: Workload
    settings: Settings
    folder: Path
    max_len: int
    cpu: bool
    arguments: Sequence[str]
    watcher: Watcher
    examine: Callable[[Sequence[Measured], bool], dict[str, Any]] = lambda _runs, _shared: {}
    kv_element_bytes: int = 2

    def measure(self, backend: Backend, keep: Callable[[dict[str, Any]], None]) -> None:
        """Start the engine on `backend` and fill its entry of the record.

        keep: called with the entry after every row. A server that does not start, another back end that
        serves instead of ours, a module that is compiled once the engine is ready, and an interruption, which
        is raised again, are entry["failed"].
        """
        arguments = engines.server_arguments(
            self.kind,
            backend,
            max_len=self.max_len,
            cpu=self.cpu,
            dummy=self.model.dummy,
            extra=self.arguments,
        )
        name = engines.file_name(backend.text)
        stats = self.folder / "stats" / name
        server = engines.make_server(
            self.kind,
            backend,
            self.model.name,
            arguments,
            cpu=self.cpu,
            stats=stats,
            log=self.folder / f"{name}.log",
            progress=lambda seconds, line: self.watcher.starting(backend.text, seconds, line),
            start_timeout=self.settings.start_timeout,
        )
        entry: dict[str, Any] = {
            "name": backend.text,
            "variables": backend.variables,
            "command": server.command,
            "ready_s": None,
            "builds": {"before_ready": None, "after_ready": []},
            "points": [],
            "sustained": None,
            "failed": None,
            "interrupted": False,
        }
        before: list[str] = []

        def told() -> None:
            if entry["ready_s"] is not None:
                entry["builds"]["after_ready"] = counted.late_builds(stats, before)
            keep(entry)

        began = time.perf_counter()
        try:
            with server:
                entry["ready_s"] = round(time.perf_counter() - began, 2)
                before = counted.built(stats)
                entry["builds"]["before_ready"] = len(before)
                self._load(server, backend, stats, entry, told)
            entry["failed"] = counted.impostor(backend, counted.counted(stats), self.model.layers)
        except ServerError as error:
            entry["failed"] = str(error)
        except KeyboardInterrupt:
            entry["failed"], entry["interrupted"] = (
                f"interrupted; complete rates: {len(entry['points'])}",
                True,
            )
            raise
        finally:
            told()
            if late := counted.late_builds_text(backend, entry["builds"]["after_ready"]):
                entry["failed"] = "; ".join(filter(None, (entry["failed"], late)))
                keep(entry)

    def _load(
        self,
        server: Server,
        backend: Backend,
        stats: Path,
        entry: dict[str, Any],
        keep: Callable[[], None],
    ) -> None:
        settings = self.settings
        warm = self._requests(settings.start, settings.warm_up, run=_WARM_UP)
        first = self._send(server, [Request(each.prompt, each.max_tokens) for each in warm])
        if errors := [outcome.error for outcome in first.outcomes if outcome.error]:
            raise ServerError(f"the warm-up failed: {errors[0]}")
        if why := counted.impostor(backend, counted.counted(stats), self.model.layers):
            raise ServerError(why)

        def probe(rate: float) -> bool:
            row = self._row(server, backend, stats, rate)
            entry["points"].append(row)
            good, failed = held_below({each["rate"]: each["holds"] for each in entry["points"]})
            entry["sustained"] = {"rate": good, "failed": failed, "how": "so far"}
            keep()
            self.watcher.measured(backend.text, row)
            return bool(row["holds"])

        if settings.rates:
            rate, failed = held_below({rate: probe(rate) for rate in settings.rates})
            entry["sustained"] = {"rate": rate, "failed": failed, "how": "grid"}
        else:
            found = highest_rate(
                probe,
                low=settings.low,
                high=settings.high,
                start=settings.start,
                tolerance=settings.tolerance,
            )
            entry["sustained"] = {"rate": found.rate, "failed": found.failed, "how": "bisection"}

    def _row(self, server: Server, backend: Backend, stats: Path, rate: float) -> dict[str, Any]:
        settings = self.settings
        runs: list[Measured] = []
        counts: list[tuple[ProcessStats | None, ProcessStats | None]] = []
        late = 0
        for run in range(settings.runs):
            count = settings.requests
            if settings.duration is not None:
                count = max(2, round(settings.duration * rate))
            requests = self._requests(rate, count, run=run)
            self._prime(server, rate, run)
            before = counted.counted(stats)
            give_up = self._give_up(len(requests), late)
            load = self._send(
                server,
                requests,
                give_up=give_up,
                watch=partial(self.watcher.loading, backend.text, rate, run),
            )
            runs.append(Measured(requests, load))
            counts.append((before, counted.counted(stats)))
            with (self.folder / records.REQUESTS).open("a") as file:
                lines = records.request_lines(backend.text, rate, runs[-1], number=run)
                file.writelines(f"{line}\n" for line in lines)
            if give_up:
                late += load.late(give_up[0], load.seconds, requests)
            if load.stopped:
                break
        row = summarize(rate, runs, settings.objectives, seed=settings.seed)
        each = self.model.kv_bytes_per_token(self.kv_element_bytes)
        row |= counted.increase(counts, None if each is None else decode_kv_bytes(runs, each))
        return row | self.examine(runs, bool(row["fi"] and row["fi"]["shared_plans"]))

    def _give_up(self, count: int, late: int) -> tuple[float, int] | None:
        """In a search, a rate is lost once too many requests are late; a grid is measured to its end."""
        first = next((each for each in self.settings.objectives if each.metric == "ttft_ms"), None)
        if self.settings.rates or first is None:
            return None
        return first.limit_ms / 1000, allowed_late(count * self.settings.runs, first.percent) - late

    def _requests(self, rate: float, count: int, *, run: int) -> list[Request]:
        arrivals = self.workload.arrivals(rate, count, seed=self.settings.seed, run=run)
        prompts = self._prompts(rate, run)
        return [
            Request(
                prompts.prompt(arrival, index),
                arrival.answer,
                arrival.at,
                arrival.samples,
                prefix=arrival.prefix,
            )
            for index, arrival in enumerate(arrivals)
        ]

    def _prompts(self, rate: float, run: int) -> Prompts:
        return Prompts(self.model.vocabulary, [self.settings.seed, round(rate * 1e6), run])

    def _prime(self, server: Server, rate: float, run: int) -> None:
        """Put the shared prefixes into the cache, then wait until the server has nothing to do."""
        prompts = self._prompts(rate, run)
        primers = [Request(prompts.prefix(path), 1) for path in self.workload.primers]
        for requests in (primers, [Request([1] * 8, 1)]):
            load = self._send(server, requests)
            if errors := [outcome.error for outcome in load.outcomes if outcome.error]:
                raise ServerError(f"a request before the run failed: {errors[0]}")

    def _send(self, server: Server, requests: Sequence[Request], **options: Any) -> LoadRun:
        return run_load(
            server.url,
            self.kind.protocol,
            self.model.name,
            requests,
            timeout=self.settings.timeout,
            **options,
        )
