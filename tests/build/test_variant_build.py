# SPDX-License-Identifier: Apache-2.0
"""Variants of the user compile for GPUs without running there, and in the time that any module has."""

from __future__ import annotations

import pytest
from build_cost import expect_cheap, measured

from fi_backend import AttentionSpec, AttentionVariant, variants
from fi_backend.core import jit
from fi_backend.core.jit.toolkit import find_toolkit
from fi_backend.core.kernels import attention_module, cuda_attention_module
from fi_backend.core.variant_source import explain, variant_module
from fi_backend.errors import BuildError

SPEC = AttentionSpec(8, 2, 128)
FP8 = AttentionSpec(8, 2, 128, kv_dtype="float8_e4m3fn")
CASES = {
    "rope-sm_90a": (variants.ROPE, SPEC, "sm_90a"),
    "qk_norm-sm_80": (variants.QK_NORM, FP8, "sm_80"),
    "sink_window-sm_90a": (variants.SINK_WINDOW, SPEC, "sm_90a"),
    "channel_scales-sm_90a": (variants.CHANNEL_SCALES, SPEC, "sm_90a"),
    "output_gate-sm_80": (variants.OUTPUT_GATE, SPEC, "sm_80"),
    "rope-cpu": (variants.ROPE, SPEC, "cpu"),
    "flash_sigmoid-cpu": (variants.FLASH_SIGMOID, FP8, "cpu"),
}


def need_nvcc() -> None:
    try:
        find_toolkit()
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")


@pytest.mark.parametrize(("variant", "spec", "arch"), CASES.values(), ids=CASES)
def test_a_cold_build_takes_ten_seconds_of_two_cores(variant, spec, arch, tmp_path, monkeypatch) -> None:
    if arch == "cpu":
        module = attention_module(spec, variant=variant)
    else:
        need_nvcc()
        module = cuda_attention_module(spec, arch, variant)
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    [library], used = measured(lambda: jit.build_all([variant_module(module, variant)]))
    assert library.is_file()
    expect_cheap(variant.name, used, tmp_path)


def test_an_error_of_nvcc_points_at_the_users_line(tmp_path, monkeypatch) -> None:
    need_nvcc()
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    variant = AttentionVariant(name="broken_on_gpu", finish="return no_such_name;  // the line of the error")
    with pytest.raises(BuildError) as error:
        jit.load(variant_module(cuda_attention_module(SPEC, "sm_90a", variant), variant))
    text = str(explain(variant, error.value))
    with open(__file__) as file:
        line = 1 + next(i for i, row in enumerate(file) if "the line of the error" in row)
    assert f"test_variant_build.py:{line}" in text.splitlines()[1]
    assert "no_such_name" in text.splitlines()[1]
