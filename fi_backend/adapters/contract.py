# SPDX-License-Identifier: Apache-2.0
"""Checks, when an adapter registers, that an engine still has the interface that the adapter relies on."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields, is_dataclass
from typing import Any

# (module, attribute path, leading parameter or field names that are relied on; () = existence only)
Contract = tuple[tuple[str, str, tuple[str, ...]], ...]


def mismatches(contract: Contract) -> list[str]:
    """Return what the installed engine lacks of `contract`, one line each.

    Passes on whatever the engine raises while it is imported, other than that a name does not exist.
    """
    problems = []
    for module_name, path, expected in contract:
        target: Any
        try:
            target = importlib.import_module(module_name)
            for part in path.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            problems.append(f"{module_name}.{path}: not found ({error})")
            continue
        if problem := _names_mismatch(target, expected):
            problems.append(f"{module_name}.{path}: {problem}")
    return problems


def _names_mismatch(target: Any, expected: tuple[str, ...]) -> str | None:
    if not expected:
        return None
    if is_dataclass(target):
        got = [field.name for field in fields(target)]
        missing = [name for name in expected if name not in got]
        return f"expected the fields {', '.join(missing)}, got {', '.join(got)}" if missing else None
    signature = inspect.signature(target).parameters
    got = list(signature)
    if any(p.kind is p.VAR_KEYWORD for p in signature.values()) and got[0] not in expected:
        return None  # wrapped by another plug-in: the names are hidden
    if tuple(got[: len(expected)]) != expected:
        return f"expected the parameters ({', '.join(expected)}, ...), got ({', '.join(got)})"
    return None
