# SPDX-License-Identifier: Apache-2.0
"""Checks, when an adapter registers, that an engine still has the interface that the adapter relies on."""

from __future__ import annotations

import dis
import importlib
import inspect
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any

# (module, attribute path, what is relied on). A tuple: leading parameters, or fields of a record; () stands
# for existence alone. A frozenset: attributes that a class gives to its instances.
Contract = tuple[tuple[str, str, tuple[str, ...] | frozenset[str]], ...]


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


def _names_mismatch(target: Any, expected: tuple[str, ...] | frozenset[str]) -> str | None:
    if not expected:
        return None
    if isinstance(expected, frozenset):
        missing = sorted(expected - _attributes(target))
        return f"expected the attributes {', '.join(missing)} of its instances" if missing else None
    if (got := _fields(target)) is not None:
        missing = [name for name in expected if name not in got]
        return f"expected the fields {', '.join(missing)}, got {', '.join(got)}" if missing else None
    signature = inspect.signature(target).parameters
    got = list(signature)
    if any(p.kind is p.VAR_KEYWORD for p in signature.values()) and got[0] not in expected:
        return None  # wrapped by another plug-in: the names are hidden
    if tuple(got[: len(expected)]) != expected:
        return f"expected the parameters ({', '.join(expected)}, ...), got ({', '.join(got)})"
    return None


def _fields(target: Any) -> list[str] | None:
    """Return the fields of a dataclass or of a Struct of msgspec, None for anything else."""
    if is_dataclass(target):
        return [field.name for field in fields(target)]
    names = getattr(target, "__struct_fields__", None)
    return None if names is None else list(names)


def _attributes(target: type) -> set[str]:
    """Return what a class or its bases declare, or store in `self.<name>` or another `<object>.<name>`."""
    found = set(_fields(target) or ())
    for each in target.__mro__:
        found.update(vars(each), vars(each).get("__annotations__", ()))
        for member in vars(each).values():
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType):
                found.update(i.argval for i in dis.get_instructions(function) if i.opname == "STORE_ATTR")
    return found
