# SPDX-License-Identifier: Apache-2.0
"""The CUDA target of a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fi_backend.core.jit import ModuleSpec, arch
from fi_backend.errors import UnsupportedError


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two devices, a Hopper and an Ampere, with the second as torch's current one; yields what was asked."""
    asked: list[int] = []

    def capability(index: int) -> tuple[int, int]:
        asked.append(index)
        return [(9, 0), (8, 0), (7, 5)][index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    arch._arch.cache_clear()
    yield asked
    arch._arch.cache_clear()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (0, "sm_90a"),
        ("cuda:0", "sm_90a"),
        (torch.device("cuda", 0), "sm_90a"),
        (1, "sm_80"),
        ("cuda", "sm_80"),
    ],
)
def test_device_in_any_form(device: torch.device | str | int, name: str, devices: list[int]) -> None:
    assert arch.cuda_arch(device) == name
    assert arch.cuda_arch(device) == name
    assert len(devices) == 1, "the driver is asked once"


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_capability(capability: tuple[int, int], name: str) -> None:
    assert arch.arch_of_capability(*capability) == name
    assert name in arch.KNOWN_ARCHS


def test_every_known_arch_names_a_module() -> None:
    for name in arch.KNOWN_ARCHS:
        assert ModuleSpec("m", ("x.cu",), arch=name).arch == name


def test_an_old_device_and_another_kind_of_device_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"8\.0 \(Ampere\) or newer; got 7\.5"):
        arch.cuda_arch(2)
    with pytest.raises(ValueError, match=r"expected a CUDA device such as 'cuda:0'; got 'cpu'"):
        arch.cuda_arch("cpu")
