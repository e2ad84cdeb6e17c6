# SPDX-License-Identifier: Apache-2.0
"""What our counters say of an engine under load: who served, what sharing saved, what was compiled when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.serving.engines import Backend
from fi_backend.core.counters import ProcessStats, read_builds, read_stats, total

_COUNTS = ("steps", "plans", "attention_calls", "replayed_calls", "captured_calls", "tokens")
_SHARED = ("shared_plans", "prefix_nodes", "kv_tokens_saved", "kv_bytes_saved")


def counted(stats: Path) -> ProcessStats | None:
    """Return the counts of all processes of an engine, or None where none of them has fi_backend loaded."""
    return total(read_stats(stats)) if stats.is_dir() else None


def impostor(backend: Backend, counts: ProcessStats | None, layers: int | None) -> str | None:
    """Return why the layers were not served by the back end that was asked for, or None.

    layers: of the model, where known.
    """
    calls = 0 if counts is None else counts.attention_calls + counts.replayed_calls
    if backend.ours and (counts is None or not calls):
        return f"{backend.name}: another back end served the layers; ours counted no attention call"
    if backend.ours and layers and counts is not None and counts.layers % layers:
        return f"{backend.name}: expected a multiple of {layers} layers on ours; counted {counts.layers}"
    if not backend.ours and calls:
        return f"{backend.name}: fi served instead; it counted {calls} attention calls"
    return None


def increase(
    pairs: Sequence[tuple[ProcessStats | None, ProcessStats | None]], flat: int | None
) -> dict[str, Any]:
    """Return {"fi": counts, "kv_bytes": {"flat", "saved"}} of runs.

    pairs: the counts before and after each run. flat: KV bytes that decoding reads without sharing. fi and
    saved are None where another back end served.
    """
    known = [(before, after) for before, after in pairs if before and after and after.layers]
    if not known:
        return {"fi": None, "kv_bytes": {"flat": flat, "saved": None}}
    counts = {
        name: sum(getattr(after, name) - getattr(before, name) for before, after in known)
        for name in (*_COUNTS, *_SHARED)
    }
    return {"fi": counts, "kv_bytes": {"flat": flat, "saved": counts["kv_bytes_saved"]}}


def built(stats: Path) -> list[str]:
    """Return the names of the native modules that the engine's processes have begun to compile."""
    return read_builds(stats) if stats.is_dir() else []


def late_builds(stats: Path, before: Sequence[str]) -> list[str]:
    """Return what has been compiled since built() gave `before`."""
    return list((Counter(built(stats)) - Counter(before)).elements())


def late_builds_text(backend: Backend, names: Sequence[str]) -> str | None:
    """Return why a run with late builds is none, or None."""
    if not names:
        return None
    return (
        f"{backend.name}: expected nothing to be compiled once the engine is ready; got {', '.join(names)}, "
        "for which requests waited. Compile it before: fi-backend build"
    )
