# SPDX-License-Identifier: Apache-2.0
"""What is compiled ahead of the first request, and the list of shipped CUDA instances."""

from __future__ import annotations

import pytest

from fi_backend.core import jit, prepare
from fi_backend.core.shipped import shipped
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import unsupported_reason


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The runs of the build, as names of modules with their targets; nothing is compiled."""
    runs: list[list[str]] = []
    monkeypatch.setattr(jit, "build_all", lambda specs: runs.append([f"{s.name} {s.arch}" for s in specs]))
    monkeypatch.setattr(prepare, "cuda_arch", lambda device: {"cuda:1": "sm_90a"}[str(device)])
    return runs


def test_all_modules_of_a_device_in_one_run(built: list[list[str]]) -> None:
    specs = [AttentionSpec(8, 2, dim) for dim in (64, 128)]
    prepare.prepare(*specs)
    prepare.prepare(*specs, specs[0], device="cuda:1")
    assert built == [
        ["planner cpu", "cpu_ops cpu", "cpu_attention_bfloat16_bfloat16 cpu"],
        [
            "planner cpu",
            "cuda_planner sm_90a",
            "cuda_ops sm_90a",
            "cuda_attention_bfloat16_bfloat16_64x64 sm_90a",
            "cuda_attention_bfloat16_bfloat16_128x128 sm_90a",
        ],
    ]


def test_what_modules_do_not_depend_on() -> None:
    base = AttentionSpec(32, 8, 128)
    same = [
        AttentionSpec(7, 1, 128, page_size=1, window_left=100, causal=False),
        AttentionSpec(4, 4, 128, sinks=True, scale=0.5),
    ]
    assert prepare.modules(base, arch="sm_80") == prepare.modules(base, *same, arch="sm_80")


def test_shipped_instances_are_supported_and_at_most_forty_modules() -> None:
    assert {unsupported_reason(spec, "cuda") for spec in shipped()} == {None}
    attention = {
        module for module in prepare.modules(*shipped(), arch="sm_90a") if "attention" in module.name
    }
    assert len(attention) == len(shipped()) <= 40
    dims = {(spec.head_dim, spec.head_dim_v) for spec in shipped()}
    assert dims >= {(size, size) for size in (64, 80, 96, 112, 128, 192, 256)} | {(192, 128)}
