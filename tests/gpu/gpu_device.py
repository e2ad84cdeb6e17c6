# SPDX-License-Identifier: Apache-2.0
"""The device under test, and what the tests of attention do with it.

`pytest tests/gpu/test_cuda_attention*.py --gpu-tests-on=cpu` runs the same bodies on a machine without a GPU,
where a captured graph is a function that is called again. It checks the tests, not the CUDA kernels. With
--gpu-tests-on=sm_90a (or another target) the source of the CUDA kernels runs there, on an emulated GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

_state = {"device": "cuda"}


def use(device: str) -> None:
    """Set the device under test: "cuda" or "cpu"."""
    _state["device"] = device


def device() -> str:
    return _state["device"]


def on_cuda() -> bool:
    return _state["device"] == "cuda"


def synchronize() -> None:
    if on_cuda():
        torch.cuda.synchronize()


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of `step`, to be replayed by calling it; what `step` needs must have been made before."""
    if not on_cuda():
        return step
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, any call that makes the host wait for the device raises."""
    if not on_cuda():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def occupy(milliseconds: float) -> None:
    """Keep the current stream busy for a while, so that what follows queues up behind."""
    if on_cuda():
        torch.cuda._sleep(int(milliseconds * 1.8e6))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts_of(q_lens: tuple[int, ...] | list[int]) -> Tensor:
    """qo_indptr of requests with these query lengths, on the host."""
    return torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)


def only_on_cuda() -> None:
    """Skip what a CPU cannot stand in for."""
    if not on_cuda():
        pytest.skip("needs a CUDA device")
