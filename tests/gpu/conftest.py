# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder need a CUDA device and are skipped without one.

The tests of attention and of its variants also run on a CPU, with --gpu-tests-on=cpu to check the tests
themselves, and with --gpu-tests-on=sm_90a (or another target) to run the source of the CUDA kernels on an
emulated GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import emulator_modules
import gpu_device
import pytest
import torch
from gpu_specs import all_specs

from fi_backend.core import kernels
from fi_backend.core.jit import ModuleSpec
from fi_backend.core.prepare import prepare
from fi_backend.errors import BuildError


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch."""
    parser.addoption(
        "--gpu-tests-on",
        default="cuda",
        help="cpu: check the bodies of the attention tests without a GPU; sm_90a, ...: emulate that GPU",
    )
    parser.addoption(
        "--kernel-define",
        action="append",
        default=[],
        help="NAME=VALUE for the attention kernels under test; FI_EVERY_LANE_ARRIVES=1: racecheck can follow",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell the helpers."""
    there = config.getoption("--gpu-tests-on", "cuda")
    gpu_device.use("cuda" if there == "cuda" else "cpu")
    if there.startswith("sm_"):
        emulator_modules.install(there)
    if defines := config.getoption("--kernel-define", []):
        chosen = [tuple(text.split("=", 1)) for text in defines]
        kernels.cuda_attention_module = _with_defines(kernels.cuda_attention_module, chosen)


def _with_defines(
    module: Callable[..., ModuleSpec], defines: Sequence[tuple[str, ...]]
) -> Callable[..., ModuleSpec]:
    """Compile attention in modules of their own with further defines."""
    suffix = "_".join("_".join(define) for define in defines).lower()

    def changed(*arguments: Any) -> ModuleSpec:
        plain = module(*arguments)
        return replace(plain, name=f"{plain.name}_{suffix}", defines=(*plain.defines, *defines))

    return changed


# Files whose tests need nothing of CUDA but the kernels of attention.
_ELSEWHERE = ("test_cuda_attention", "test_cuda_user_variants")


def _skip_without_a_device() -> None:
    if gpu_device.on_cuda() and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def needs_a_cuda_device(request: pytest.FixtureRequest) -> None:
    """Skip the module where torch sees no GPU."""
    if not gpu_device.on_cuda() and not request.module.__name__.startswith(_ELSEWHERE):
        pytest.skip("needs a CUDA device")
    _skip_without_a_device()


@pytest.fixture(scope="session")
def attention_modules(request: pytest.FixtureRequest) -> None:
    """Compile everything that the tests of attention load, all of it at once; emulated, as it is needed."""
    _skip_without_a_device()  # fixtures of the session come before those of a module
    if request.config.getoption("--gpu-tests-on").startswith("sm_"):
        return
    # A module that does not compile fails the tests that load it, and not all the others.
    with contextlib.suppress(BuildError):
        prepare(*all_specs(), device=gpu_device.device())
