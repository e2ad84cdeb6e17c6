# SPDX-License-Identifier: Apache-2.0
"""Where a module is: in the cache, made here or by another machine, or nowhere yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fi_backend import env
from fi_backend.core.jit import cache
from fi_backend.core.jit.manifest import search
from fi_backend.core.jit.module import ModuleSpec
from fi_backend.core.jit.tools import MissingToolError, ninja_binary
from fi_backend.errors import BuildError

_SHOWN = 3


@dataclass(frozen=True)
class Place:
    """ready: the folder to load from; else target: where a build goes; else obstacle: what a build lacks.

    refused: modules of the same name in the cache that do not serve here, with the reasons.
    """

    ready: Path | None
    target: Path | None = None
    obstacle: str = ""
    refused: tuple[str, ...] = ()


def locate(spec: ModuleSpec, cache_dir: Path, *, portable: bool = False) -> Place:
    """Find the module of `spec`; compiles nothing.

    The module that this machine's compilers made comes first; then one by other compilers that uses this
    processor as fully; then, where nothing can be compiled, the one that uses most of it.
    Raises BuildError if a source is missing.
    """
    target, obstacle = None, ""
    try:
        target = cache.module_folder(spec, cache_dir, portable=portable)
        if cache.is_built(target):
            return Place(target, target)
        ninja_binary()
    except MissingToolError as error:
        obstacle = str(error)
    if portable and not obstacle:
        return Place(None, target)
    found = search(spec, cache_dir)
    cannot_build = obstacle or env.jit_disabled() or not cache.is_writable(cache_dir)
    chosen = next(iter(found.fitting if cannot_build else found.native), None)
    return Place(chosen, None if obstacle else target, obstacle, found.refused)


def must_be_built(missing: Mapping[ModuleSpec, Place], cache_dir: Path) -> dict[ModuleSpec, Path]:
    """Return the folders in which to build `missing`; raises BuildError if that cannot or may not be done."""
    modules = ", ".join(f"{spec.name} ({spec.arch})" for spec in missing)
    commands = " and ".join(dict.fromkeys(f"`{spec.build_command}`" for spec in missing))
    if env.jit_disabled():
        raise BuildError(
            f"not in the cache {cache_dir}: {modules}; {env.DISABLE_JIT.name}=1 forbids compiling now. "
            f"Run {commands} with the same {env.CACHE_DIR.name}, or unset {env.DISABLE_JIT.name}"
            + _refusals(missing)
        )
    if obstacles := list(dict.fromkeys(place.obstacle for place in missing.values() if place.obstacle)):
        raise BuildError(
            f"{'; '.join(obstacles)}\nneeded because the cache {cache_dir} does not hold {modules}; a cache "
            f"that {commands} filled on another machine serves too" + _refusals(missing)
        )
    return {spec: place.target for spec, place in missing.items() if place.target is not None}


def _refusals(missing: Mapping[ModuleSpec, Place]) -> str:
    refused = [reason for place in missing.values() for reason in place.refused]
    more = [f"and {len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
    lines = [*refused[:_SHOWN], *more]
    return "\n  ".join(["\nmodules in the cache that do not serve here:", *lines]) if lines else ""
