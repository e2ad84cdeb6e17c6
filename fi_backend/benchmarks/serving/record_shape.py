# SPDX-License-Identifier: Apache-2.0
"""The shape of a serving record, so that a foreign or damaged one is refused before it is pooled or shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class _Maybe:
    """None, or what `shape` says. missing: the key need not be there, as in records of older versions."""

    shape: Any
    missing: bool = False


# A type; a tuple of the values that are known; a list with the shape of its elements,
# several times where it has so many; or a dict with the keys that are needed.
_SPREAD: Final = _Maybe({"p50": float, "p99": float, "max": float})
_LATENCY: Final = {percent: [_Maybe(float)] * 3 for percent in ("p50", "p90", "p99")}
_ROW: Final = {
    **dict.fromkeys(("rate", "goodput_per_s", "output_tokens_per_s"), float),
    **dict.fromkeys(("runs", "requests", "errors"), int),
    **dict.fromkeys(("stopped_early", "client_late", "holds"), bool),
    **dict.fromkeys(("ttft_ms", "itl_ms"), _LATENCY),
    **dict.fromkeys(("lag_ms", "loop_lag_ms"), _SPREAD),
    "fi": _Maybe({}),
    "kv_bytes": {"flat": _Maybe(float), "saved": _Maybe(float)},
    "balance": _Maybe(
        {
            "num_ctas": int,
            "steps": [
                {
                    "requests": int,
                    "kv_tokens": int,
                    "max_over_mean": float,
                    "prefix_nodes": _Maybe(int, missing=True),
                }
            ],
        },
        missing=True,
    ),
}
_BUILDS: Final = _Maybe({"before_ready": _Maybe(int), "after_ready": [str]}, missing=True)
_BACKEND: Final = {
    "name": str,
    "command": [str],
    "ready_s": _Maybe(float),
    "failed": _Maybe(str),
    "sustained": _Maybe({"rate": _Maybe(float), "failed": _Maybe(float), "how": str}),
    "builds": _BUILDS,
}
_RECORD: Final = {
    **dict.fromkeys(("engine", "model", "workload"), str),
    "settings": {"seed": int},
    "objectives": [{"metric": ("ttft_ms", "itl_ms"), "percent": (50, 90, 99), "limit_ms": float}],
    "versions": _Maybe({}, missing=True),
    "date": _Maybe(str, missing=True),
    "backends": [{**_BACKEND, "points": [{}]}],
}


def misshapen(record: Mapping[str, Any]) -> str | None:
    """Return where a record is not what `bench serve` writes, as "field: expected X; got Y", or None."""
    if problem := _difference(record, _RECORD, ""):
        return problem.removeprefix(": ")
    for backend in record["backends"]:
        for row in backend["points"]:
            if missing := [key for key, inner in _ROW.items() if key not in row and not _spared(inner)]:
                return f"{backend['name']}: a row lacks {', '.join(missing)}"
            if problem := _difference(row, _ROW, f"{backend['name']}: a row"):
                return problem
            if (least := min(row["rate"], row["runs"], row["requests"])) <= 0:
                return f"{backend['name']}: a row: expected rate, runs and requests > 0; got {least}"
    return None


def _spared(shape: Any) -> bool:
    return isinstance(shape, _Maybe) and shape.missing


def _difference(value: Any, shape: Any, path: str) -> str | None:
    if isinstance(shape, _Maybe):
        return None if value is None else _difference(value, shape.shape, path)
    if isinstance(shape, tuple):
        known = ", ".join(map(str, shape))
        return None if value in shape else f"{path}: expected one of {known}; got {str(value)[:60]!r}"
    wanted: Any = type(shape) if isinstance(shape, (dict, list)) else shape
    right = isinstance(value, (int, float) if wanted is float else wanted)
    if wanted in (int, float):
        right = right and not isinstance(value, bool) and -1e300 < value < 1e300  # nor NaN
    if not right:
        kind = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}.get(
            wanted, "a number"
        )
        return f"{path}: expected {kind}; got {str(value)[:60]!r}"
    found: Any = ()
    if isinstance(shape, dict):
        for key, inner in shape.items():
            if key not in value:
                if _spared(inner):
                    continue
                return f"{path}: expected a field {key}; got {', '.join(map(str, value))[:200]}"
        found = (
            (value[key], inner, f"{path}.{key}" if path else key)
            for key, inner in shape.items()
            if key in value
        )
    elif isinstance(shape, list):
        if len(shape) > 1 and len(value) != len(shape):
            return f"{path}: expected {len(shape)} values; got {len(value)}"
        found = ((each, shape[0], f"{path}[{index}]") for index, each in enumerate(value))
    return next(filter(None, (_difference(*each) for each in found)), None)
