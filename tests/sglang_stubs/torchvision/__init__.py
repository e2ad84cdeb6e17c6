# SPDX-License-Identifier: Apache-2.0
"""Stands in for torchvision, which SGLang imports for pictures: every name exists, nothing works."""

from __future__ import annotations

import enum
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"


class InterpolationMode(enum.Enum):
    """The one enumeration whose members are read when modules are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Nothing:
    """A class to inherit from and to name in annotations."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, as the import system wants it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = InterpolationMode if name == "InterpolationMode" else type(name, (_Nothing,), {})
        setattr(self, name, found)
        return found


class _Finder:
    """Finds every module below torchvision."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, _: types.ModuleType) -> None:
        """Nothing to run."""


__path__: list[str] = []
sys.meta_path.append(_Finder())  # type: ignore[arg-type]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Nothing,), {})
