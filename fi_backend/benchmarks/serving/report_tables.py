# SPDX-License-Identifier: Apache-2.0
"""The tables of the report: sustained rates, every measurement, how it was made."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_Record = Mapping[str, Any]


def summary(record: _Record) -> str:
    """Return the table of what each back end sustained and how long its engine took to start."""
    best = max((_sustained(each) or 0.0 for each in record["backends"]), default=0.0)
    rows = []
    for backend in record["backends"]:
        rate, found = _sustained(backend), backend["sustained"] or {}
        failed = found.get("failed")
        rows.append(
            [
                escape(backend["name"]),
                "none" if rate is None else f"<b>{rate:g}/s</b>",
                # Without a rate that failed, nobody knows how far it is from the best.
                f"{'≥ ' if failed is None and rate < best else ''}{rate / best:.2f}"
                if rate and best
                else "–",
                "–" if failed is None else f"{failed:g}/s",
                escape(found.get("how", "–")),
                _ready(backend),
            ]
        )
    objectives = ", ".join(
        f"P{each['percent']} {_NAMES[each['metric']]} ≤ {each['limit_ms']:g} ms"
        for each in record["objectives"]
    )
    heads = (
        "back end",
        "highest rate held",
        "of the best",
        "lowest not held",
        "found by",
        "engine ready after",
    )
    return f"<p>Objectives: {escape(objectives or 'none')}.</p>{_table(heads, rows)}"


def measurements(record: _Record) -> str:
    """Return the table of all rates; brackets are 95 % bootstrap bounds."""
    latencies = [f"{name} {percent}, ms" for name in ("TTFT", "ITL") for percent in ("P50", "P99")]
    heads = ["back end", "rate", "holds", "requests", "errors", *latencies, "goodput", "tokens/s"]
    heads += ["send lag P99", "loop lag P99"]
    rows = []
    for backend in record["backends"]:
        for row in sorted(backend["points"], key=lambda each: float(each["rate"])):
            verdict = '<span class="yes">yes</span>' if row["holds"] else '<span class="no">no</span>'
            stopped = ' <span class="bounds">stopped early</span>' if row["stopped_early"] else ""
            rows.append(
                [
                    escape(backend["name"]),
                    f"{row['rate']:g}/s",
                    verdict + stopped,
                    f"{row['requests']} in {row['runs']}",
                    str(row["errors"]),
                    *(_bounded(row[m][p]) for m in ("ttft_ms", "itl_ms") for p in ("p50", "p99")),
                    f"{row['goodput_per_s']:g}/s",
                    f"{row['output_tokens_per_s']:g}",
                    *(_lag(row[name], row["client_late"]) for name in ("lag_ms", "loop_lag_ms")),
                ]
            )
    note = "Brackets: 95 % bootstrap bounds over pooled requests. Lags of the client in milliseconds; "
    note += "red: more than a tenth of an objective."
    return f'{_table(heads, rows)}<p class="bounds">{note}</p>'


def details(record: _Record) -> str:
    """Return how the record was made: date, host, versions, settings, commands."""
    entries: list[tuple[str, str]] = []
    for part in record.get("parts", [record]):
        versions = ", ".join(f"{name} {version}" for name, version in part.get("versions", {}).items())
        settings = ", ".join(f"{name} {value}" for name, value in part["settings"].items())
        entries += [
            *([("record", part["path"])] if "path" in part else ()),
            ("date", part.get("date", "")),
            ("host", part.get("host", part.get("gpu", ""))),
            *([("driver", part["driver"])] if "driver" in part else ()),
            ("versions", versions),
            ("command", part.get("command", "")),
            ("settings", settings),
        ]
    entries += [
        (f"server of {each['name']}", shlex.join(map(str, each["command"]))) for each in record["backends"]
    ]
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd><code>{escape(str(text))}</code></dd>" for name, text in entries
    )
    return f"<details><summary>How this was made</summary><dl>{listed}</dl></details>"


_NAMES = {"ttft_ms": "time to first token", "itl_ms": "time between tokens"}


def _sustained(backend: Mapping[str, Any]) -> float | None:
    rate = (backend["sustained"] or {}).get("rate")
    return None if rate is None else float(rate)


def _ready(backend: Mapping[str, Any]) -> str:
    """How long the engine took to start, and how many native modules it compiled meanwhile."""
    if backend["ready_s"] is None:
        return "–"
    built = (backend.get("builds") or {}).get("before_ready")
    return f"{backend['ready_s']:g} s" + (f", {built} compiled" if built else "")


def _bounded(triple: Sequence[float | None]) -> str:
    value, low, high = triple
    if value is None:
        return "–"
    bounds = "" if low is None else f' <span class="bounds">[{low:.4g}, {high:.4g}]</span>'
    return f"{value:.4g}{bounds}"


def _lag(spread: Mapping[str, float] | None, late: bool) -> str:
    if spread is None:
        return "–"
    return f'<span class="no">{spread["p99"]:.3g}</span>' if late else f"{spread['p99']:.3g}"


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
