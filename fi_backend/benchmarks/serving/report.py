# SPDX-License-Identifier: Apache-2.0
"""The HTML report of one or several serving records: one file, readable without a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fi_backend.benchmarks.serving.charts import Point, Series, bar_chart, legend, line_chart
from fi_backend.benchmarks.serving.report_style import STYLE
from fi_backend.benchmarks.serving.report_tables import details, measurements, summary

_Record = Mapping[str, Any]


def render(records: Sequence[_Record]) -> str:
    """Return the page for records of any engines, models and workloads, one section for each record."""
    sections = "\n".join(_section(record) for record in records)
    title = "Serving: the rate held under the objectives"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{sections}\n</body>\n</html>\n"
    )


def _section(record: _Record) -> str:
    backends = record["backends"]
    names = [each["name"] for each in backends]
    heading = f"{record['engine']} · {record['model']} · {record['workload']}"
    where = f"{record.get('host', record.get('gpu', ''))}, {record.get('date', '')[:10]}"
    key = legend(
        [(index, False, f"{name}, P99") for index, name in enumerate(names)]
        + [(index, True, f"{name}, P50") for index, name in enumerate(names)]
    )
    charts = [
        ("Time to first token", key, _latency(record, "ttft_ms"), ""),
        ("Time between tokens", key, _latency(record, "itl_ms"), ""),
        ("Goodput", legend((index, False, name) for index, name in enumerate(names)), _goodput(record), ""),
        *_kv(record),
        *_balance(record),
    ]
    figures = "\n".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{chart}{key}{_small(note)}</figure>"
        for title, key, chart, note in charts
    )
    failures = "".join(
        f'<p class="failed"><b>{escape(each["name"])}</b>: {escape(each["failed"][:2000])}</p>'
        for each in backends
        if each["failed"]
    )
    return (
        f'<section>\n<h2>{escape(heading)}</h2>\n<p class="none">{escape(where)}</p>\n'
        f"{summary(record)}\n{failures}\n"
        f'<div class="charts">\n{figures}\n</div>\n{measurements(record)}\n{details(record)}\n</section>'
    )


def _small(text: str) -> str:
    return f'<p class="bounds">{escape(text)}</p>' if text else ""


def _latency(record: _Record, metric: str) -> str:
    series = []
    for index, backend in enumerate(record["backends"]):
        for percent in ("p99", "p50"):
            points = []
            for row in _rows(backend):
                value, low, high = row[metric][percent]
                if value is not None:
                    points.append(Point(row["rate"], value, low, high, _note(row, metric, percent)))
            label = f"{backend['name']}, {percent.upper()}"
            series.append(Series(label, tuple(points), index, percent == "p50"))
    limit = next(
        (
            (each["limit_ms"], f"objective: P{each['percent']} ≤ {each['limit_ms']:g} ms")
            for each in record["objectives"]
            if each["metric"] == metric
        ),
        None,
    )
    return line_chart(series, x_label="requests per second", y_label="milliseconds", limit=limit, log=True)


def _note(row: Mapping[str, Any], metric: str, percent: str) -> str:
    value, low, high = row[metric][percent]
    bounds = "" if low is None else f" ({low:g} to {high:g})"
    stopped = ", stopped early: at least" if row["stopped_early"] else ""
    return f"{row['rate']:g}/s{stopped} {value:g} ms{bounds}, {row['requests']} requests"


def _goodput(record: _Record) -> str:
    series = [
        Series(
            backend["name"],
            tuple(
                Point(
                    row["rate"], row["goodput_per_s"], note=f"{row['goodput_per_s']:g} of {row['rate']:g}/s"
                )
                for row in _rows(backend)
            ),
            index,
        )
        for index, backend in enumerate(record["backends"])
    ]
    return line_chart(
        series,
        x_label="requests per second",
        y_label="requests per second within the objectives",
        diagonal=True,
    )


_KV_NOTE = (
    "Counted: K and V of all layers that decoding reads when every sample reads its own, from the lengths of "
    "prompts and answers; with sharing, less what the back end's counters say its steps did not read again."
)


def _kv(record: _Record) -> Iterator[tuple[str, str, str, str]]:
    """KV bytes that decoding reads, with and without sharing, for each back end of ours."""
    for backend in record["backends"]:
        rows = [
            row for row in _rows(backend) if row["kv_bytes"]["saved"] is not None and row["kv_bytes"]["flat"]
        ]
        if not rows:
            continue
        groups = []
        for row in rows:
            # A request: rates have different numbers of them, above all where records are pooled.
            flat, saved = (row["kv_bytes"][name] / row["requests"] / 1e6 for name in ("flat", "saved"))
            read = max(flat - saved, 0.0)
            groups.append(
                (
                    f"{row['rate']:g}/s",
                    [
                        (5, flat, f"{row['rate']:g}/s without sharing: {flat:.4g} MB"),
                        (2, read, f"{row['rate']:g}/s with sharing: {read:.4g} MB"),
                    ],
                )
            )
        key = legend([(5, False, "every request its own"), (2, False, "shared prefixes once")])
        chart = bar_chart(groups, y_label="MB a request")
        yield f"KV bytes read while decoding, {backend['name']}", key, chart, _KV_NOTE


def _balance(record: _Record) -> Iterator[tuple[str, str, str, str]]:
    """Largest load over the mean in sampled decode steps, for each back end of ours."""
    for index, backend in enumerate(record["backends"]):
        rows = [row for row in _rows(backend) if row["fi"] is not None and row.get("balance")]
        groups = [
            (
                f"{row['rate']:g}/s",
                [(index, each["max_over_mean"], _step_note(each)) for each in row["balance"]["steps"]],
            )
            for row in rows
        ]
        if groups:
            title = f"Balance over {rows[0]['balance']['num_ctas']} CTAs in sampled steps, {backend['name']}"
            key = legend([(index, False, "a bar for each step; 1 is perfect")])
            chart = bar_chart(groups, y_label="largest load / mean load")
            yield title, key, chart, _balance_note([row["balance"] for row in rows])


def _balance_note(balances: Sequence[Mapping[str, Any]]) -> str:
    """How the steps were planned; records of before say nothing and were planned flat."""
    shared = {bool(each.get("shared")) for each in balances}
    how = {
        (False,): "planned flat, as every request read its own KV",
        (True,): "planned with the workload's prefixes read together, as the run did",
        (False, True): "planned with the workload's prefixes read together at the rates at which the run did",
    }[tuple(sorted(shared))]
    return f"Batches put together anew from the times at which tokens came, {how}."


def _step_note(step: Mapping[str, Any]) -> str:
    shared = f", {step['prefix_nodes']} shared prefixes" if step.get("prefix_nodes") else ""
    return f"{step['max_over_mean']:g}: {step['requests']} requests, {step['kv_tokens']} KV tokens{shared}"


def _rows(backend: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sorted(backend["points"], key=lambda row: float(row["rate"]))
