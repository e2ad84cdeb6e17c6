# SPDX-License-Identifier: Apache-2.0
"""Which modules are compiled for a machine with a GPU ahead of its tests and benchmarks."""

from __future__ import annotations

import gpu_modules
from fi_backend.benchmarks.cuda.tables import TABLES, TARGETS
from fi_backend.core import kernels

ARCH = "sm_90a"


def test_the_rows_of_the_target_table_find_theirs() -> None:
    ready = set(gpu_modules.attention_modules(ARCH))
    needed = {kernels.cuda_attention_module(row.spec, ARCH) for row in TABLES[TARGETS]()}
    assert len(needed) >= 3, "16-bit, fp8 and batch-invariant ones"
    assert needed <= ready


def test_every_shipped_variant_has_one() -> None:
    modules = list(gpu_modules.variant_modules(ARCH))
    assert len(modules) == len(set(modules)) == len(gpu_modules.ORACLES)
    assert {module.arch for module in modules} == {ARCH}


def test_all_sets_name_modules_of_the_target() -> None:
    for modules in gpu_modules.SETS.values():
        assert {module.arch for module in modules("sm_80")} == {"sm_80"}
