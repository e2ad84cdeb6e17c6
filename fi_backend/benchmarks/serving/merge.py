# SPDX-License-Identifier: Apache-2.0
"""Records of one comparison that was made in several calls, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.serving.pool import Key, Part, pool, read_requests
from fi_backend.benchmarks.serving.search import held_below
from fi_backend.benchmarks.serving.summary import Objective

_Entry = dict[str, Any]
# Where is looked, how often and with what luck; a rate that two records have is measured alike all the same.
_FREE = ("rates", "runs", "seed", "low", "high", "start", "tolerance", "start_timeout")
_MACHINE = ("gpu", "host")


@dataclass(frozen=True)
class Source:
    """A record and where it came from: its file, or the folder that holds it."""

    path: Path
    record: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Where its requests lie."""
        return self.path if self.path.is_dir() else self.path.parent


def merge(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return one record for each engine, model and workload, in order of their first source.

    All back ends stand side by side; what several sources have of one back end and rate is pooled, with
    bounds of its own. A record that stands alone is returned as it is. Raises ValueError, naming both sources
    and what differs, for other settings, objectives, machines or versions; and where two have the same
    requests.
    """
    groups: dict[tuple[str, str, str], list[Source]] = {}
    for source in sources:
        record = source.record
        groups.setdefault((record["engine"], record["model"], record["workload"]), []).append(source)
    return [dict(group[0].record) if len(group) == 1 else _together(group) for group in groups.values()]


def _together(group: Sequence[Source]) -> dict[str, Any]:
    first = group[0].record
    for source in group[1:]:
        if found := list(_differences(first, source.record)):
            raise ValueError(
                f"{source.path}: expected what {group[0].path} has, whose engine, model and workload are the "
                f"same; got {'; '.join(found)}. Measure again with equal settings, or report them one by one."
            )
    names = dict.fromkeys(entry["name"] for source in group for entry in source.record["backends"])
    objectives = [Objective(**each) for each in first["objectives"]]
    kept = ("date", *_MACHINE, "driver", "versions", "command", "settings")
    parts = [
        {"path": str(source.path), **{name: source.record[name] for name in kept if name in source.record}}
        for source in group
    ]
    backends = [_backend(name, group, objectives) for name in names]
    return {**first, "backends": backends, "parts": parts}


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    pairs = [(name, first.get(name), other.get(name)) for name in _MACHINE]
    for field in ("versions", "settings"):
        ours, theirs = first.get(field, {}), other.get(field, {})
        names = [name for name in {**ours, **theirs} if field != "settings" or name not in _FREE]
        pairs += [(f"{field}: {name}", ours.get(name), theirs.get(name)) for name in names]
    pairs.append(("objectives", first["objectives"], other["objectives"]))
    for name, wanted, got in pairs:
        if wanted != got:
            yield f"{name} {got!r} instead of {wanted!r}"


def _backend(name: str, group: Sequence[Source], objectives: Sequence[Objective]) -> _Entry:
    """The entry of one back end from all sources that have it."""
    found = [
        (source, entry) for source in group for entry in source.record["backends"] if entry["name"] == name
    ]
    if len(found) == 1:
        return dict(found[0][1])
    good = [(source, entry) for source, entry in found if _counts(entry)]
    _check_seeds(name, good)
    points = _points(name, good, objectives)
    failures = [f"{source.path}: {entry['failed']}" for source, entry in found if entry["failed"]]
    rate, failed = held_below({row["rate"]: row["holds"] for row in points})
    starts = [entry["ready_s"] for _, entry in found if entry["ready_s"] is not None]
    return {
        **found[0][1],
        "ready_s": max(starts, default=None),
        "builds": _builds([entry.get("builds") or {} for _, entry in found]),
        "points": points,
        "sustained": {"rate": rate, "failed": failed, "how": f"{len(good)} records"} if good else None,
        "failed": "\n".join(failures) or None,
    }


def _counts(entry: _Entry) -> bool:
    """Whether its rows are pooled: not those of a run that failed, but what an interrupted one completed."""
    late = (entry.get("builds") or {}).get("after_ready")
    return not entry["failed"] or bool(entry.get("interrupted") and not late)


def _check_seeds(name: str, found: Sequence[tuple[Source, _Entry]]) -> None:
    seen: dict[tuple[float, int], int] = {}
    for index, (source, entry) in enumerate(found):
        seed = source.record["settings"]["seed"]
        for row in entry["points"]:
            before = seen.setdefault((row["rate"], seed), index)
            if before != index:
                raise ValueError(
                    f"{source.path}: expected other requests than {found[before][0].path} has; got {name} at "
                    f"{row['rate']:g}/s with seed {seed} in both. Measure with another --seed to pool them."
                )


def _points(
    name: str, found: Sequence[tuple[Source, _Entry]], objectives: Sequence[Objective]
) -> list[dict[str, Any]]:
    rates: dict[float, list[tuple[Source, dict[str, Any]]]] = {}
    for source, entry in found:
        for row in entry["points"]:
            rates.setdefault(row["rate"], []).append((source, row))
    several: dict[Path, set[Key]] = {}
    for rate, rows in rates.items():
        if len(rows) > 1:
            for source, _ in rows:
                several.setdefault(source.folder, set()).add((name, rate))
    lines = {folder: read_requests(folder, wanted) for folder, wanted in several.items()}
    points = []
    for rate, rows in rates.items():
        if len(rows) == 1:
            points.append(rows[0][1])
            continue
        parts = [Part(row, lines[source.folder][name, rate]) for source, row in rows]
        try:
            points.append(pool(rate, parts, objectives))
        except ValueError as error:
            paths = ", ".join(str(source.folder) for source, _ in rows)
            raise ValueError(f"{name} at {rate:g}/s, pooled from {paths}: {error}") from None
    return points


def _builds(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = [one["before_ready"] for one in each if one.get("before_ready") is not None]
    late = [name for one in each for name in one.get("after_ready", ())]
    return {"before_ready": max(counts, default=None), "after_ready": late}
