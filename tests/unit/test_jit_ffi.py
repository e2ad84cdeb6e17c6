# SPDX-License-Identifier: Apache-2.0
"""A torch that is imported after tvm-ffi is introduced to it, or refused where streams would be missed."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fi_backend.core.jit import ffi

LATE = object()


def old_torch(cuda: str | None) -> Any:
    return SimpleNamespace(
        Tensor=type("Tensor", (), {}), version=SimpleNamespace(cuda=cuda), __version__="2.5"
    )


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []
    monkeypatch.setitem(sys.modules, ffi._EXTENSION, LATE)  # type: ignore[arg-type]
    monkeypatch.setattr(ffi, "_imported_alone", True)
    monkeypatch.setattr(importlib, "reload", seen.append)
    return seen


def test_a_torch_that_describes_its_tensors_needs_nothing(
    reloads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = old_torch("12.4")
    torch.Tensor.__dlpack_c_exchange_api__ = 1
    monkeypatch.setitem(sys.modules, "torch", torch)
    ffi.meet_torch()
    assert reloads == []


def test_an_older_torch_gets_the_extension(reloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = old_torch("12.4")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(
        importlib, "reload", lambda module: setattr(torch.Tensor, "__dlpack_c_exchange_api__", module)
    )
    ffi.meet_torch()
    assert torch.Tensor.__dlpack_c_exchange_api__ is LATE


def test_without_the_extension_streams_would_be_missed(
    reloads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", old_torch("12.4"))
    with pytest.raises(ImportError, match=r"^torch: expected to be imported before fi_backend\.arrays.*2\.5"):
        ffi.meet_torch()
    monkeypatch.setitem(sys.modules, "torch", old_torch(None))  # of a CPU: there are no streams
    ffi.meet_torch()
    assert reloads == [LATE, LATE]


def test_torch_first_is_the_usual_order(reloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then tvm-ffi has looked for it by itself, and has its own way where there is no extension."""
    monkeypatch.setattr(ffi, "_imported_alone", False)
    monkeypatch.setitem(sys.modules, "torch", old_torch("12.4"))
    ffi.meet_torch()
    assert reloads == []
