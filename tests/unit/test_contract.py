# SPDX-License-Identifier: Apache-2.0
"""What a check of an engine's interface finds: modules, signatures, records and what instances hold."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from fi_backend.adapters import contract


class Base:
    declared: int

    def prepare(self) -> None:
        self.inherited = 1


class Pool(Base):
    constant = 2

    def __init__(self) -> None:
        self.table, self.rows = [], 0

    @property
    def size(self) -> int:
        return self.unset  # reads, and stores nothing

    def read(self, layer: int, *, scale: float) -> None: ...


@dataclass
class Record:
    first: int
    second: int = 0


class Struct:
    """Stands for one of msgspec, which declares its fields thus."""

    __struct_fields__ = ("first", "second")


def wrapped(*args: Any, **kwargs: Any) -> None: ...


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("some_engine")
    vars(module).update(Pool=Pool, Record=Record, Struct=Struct, wrapped=wrapped)
    monkeypatch.setitem(sys.modules, "some_engine", module)


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("Pool", ()),
        ("Pool.read", ("self", "layer")),
        ("Pool", frozenset({"table", "rows", "inherited", "declared", "constant", "size"})),
        ("Record", ("second", "first")),
        ("Record", frozenset({"first"})),
        ("Struct", ("second",)),
        ("wrapped", ("anything",)),
    ],
)
def test_what_is_there(path: str, names: Any) -> None:
    assert contract.mismatches((("some_engine", path, names),)) == []


@pytest.mark.parametrize(
    ("path", "names", "problem"),
    [
        ("Pond", (), "some_engine.Pond: not found"),
        ("Pool.write", ("self",), "some_engine.Pool.write: not found"),
        (
            "Pool.read",
            ("self", "index"),
            "expected the parameters (self, index, ...), got (self, layer, s",
        ),
        (
            "Pool",
            frozenset({"table", "unset"}),
            "expected the attributes unset of its instances",
        ),
        ("Record", ("first", "third"), "some_engine.Record: expected the fields third, got first, second"),
        ("Struct", ("third",), "some_engine.Struct: expected the fields third, got first, second"),
    ],
)
def test_what_is_not(path: str, names: Any, problem: str) -> None:
    (found,) = contract.mismatches((("some_engine", path, names),))
    assert problem in found
