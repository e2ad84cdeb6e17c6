# SPDX-License-Identifier: Apache-2.0
"""A module that is not in the cache must be there within ten seconds on two cores."""

from __future__ import annotations

import pytest
from build_cost import expect_cheap, measured

from fi_backend.core import jit
from fi_backend.core.jit.toolkit import find_toolkit
from fi_backend.core.prepare import modules
from fi_backend.core.shipped import instance
from fi_backend.errors import BuildError

PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"))
CPU = modules(*(instance(dtype, kv_dtype, (64, 64)) for dtype, kv_dtype in PAIRS), arch="cpu")
CUDA = [
    module
    for module in modules(
        instance("bfloat16", "bfloat16", (128, 128)),
        instance("float16", "float8_e4m3fn", (256, 256)),
        arch="sm_90a",
    )
    if module.arch != "cpu"
]


@pytest.mark.parametrize("module", [*CPU, *CUDA], ids=lambda module: module.name)
def test_cold_build_takes_ten_seconds_of_two_cores(module, tmp_path, monkeypatch, capfd):
    """Processor time, since a busy machine stretches the wall clock; the objects build in parallel."""
    if module.arch != "cpu":
        try:
            find_toolkit()
        except BuildError as error:
            pytest.skip(f"needs nvcc: {error}")
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    [library], used = measured(lambda: jit.build_all([module]))
    assert library.is_file()
    assert tmp_path in library.parents
    expect_cheap(module.name, used, tmp_path)
    assert module.name in capfd.readouterr().err, "the build says what it compiles"
