# SPDX-License-Identifier: Apache-2.0
"""The CUDA template compiles for both targets, without spilling into its inner loops."""

from __future__ import annotations

import re
import subprocess

import pytest

from fi_backend.core import jit
from fi_backend.core.jit import compiler
from fi_backend.errors import BuildError

SPILL_LIMIT_BYTES = 160


def nvcc() -> str:
    try:
        found = compiler.toolchain("sm_80").nvcc
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    assert found is not None
    return found


@pytest.mark.parametrize(("arch", "dtype"), [("80", "__half"), ("90a", "__nv_bfloat16")])
def test_template_compiles_with_few_spills(arch, dtype, tmp_path):
    command = [nvcc(), *compiler.NVCC_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += [f"-DFI_T={dtype}", "-DFI_HEAD_DIM=128", "-DFI_HEAD_DIM_V=128", "-Xptxas=-v", "-cubin"]
    source = jit.csrc_root() / "sm80" / "attention.cu"
    run = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "attention.cubin")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", run.stderr)]
    assert len(spills) >= 2, run.stderr
    assert max(spills) <= SPILL_LIMIT_BYTES, run.stderr
