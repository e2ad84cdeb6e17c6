# SPDX-License-Identifier: Apache-2.0
"""A module that is not in the cache must be there within ten seconds on two cores."""

from __future__ import annotations

import resource

import pytest

from fi_backend.core import jit, kernels, planner

CORES = 2
LIMIT_S = 10.0


@pytest.mark.parametrize(
    "module",
    [planner.MODULE, kernels.OPS_MODULE]
    + [
        kernels.attention_module(dtype, kv_dtype)
        for dtype, kv_dtype in (
            ("float32", "float32"),
            ("bfloat16", "bfloat16"),
            ("bfloat16", "float8_e4m3fn"),
        )
    ],
    ids=lambda module: module.name,
)
def test_cold_build_takes_ten_seconds_of_two_cores(module, tmp_path, monkeypatch, capfd):
    """Processor time, since a busy machine stretches the wall clock; the objects build in parallel."""
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    [library] = jit.build_all([module])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    assert library.is_file()
    assert tmp_path in library.parents
    assert 0.1 < used < CORES * LIMIT_S, f"{used:.1f} s of processor time for {module.name}"
    assert module.name in capfd.readouterr().err, "the build says what it compiles"
