# SPDX-License-Identifier: Apache-2.0
"""A CUDA device for fi_backend.arrays where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_driver_fake import FakeDriver, Kernel, faked

from fi_backend.core import kernels


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver of a device whose memory is the host's."""
    with faked(monkeypatch) as fake:
        yield fake


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> Kernel:
    """The attention kernel of that device, which notes what it is given."""
    fake = Kernel()
    monkeypatch.setattr(kernels, "load_attention", lambda *_: fake)
    return fake
