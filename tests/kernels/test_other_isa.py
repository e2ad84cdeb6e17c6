# SPDX-License-Identifier: Apache-2.0
"""The kernels as compiled for machines that lack what this one has; `make test-isa` runs them.

The vector width, the conversions and the use of matrix tiles follow from the instruction set, so each one
here takes branches of the sources that this machine's own build leaves out.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fi_backend import env

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
# Three of the attention modules: full width, half width, and quantised keys.
PAIRS = ("float32-float32", "bfloat16-bfloat16", "bfloat16-float8_e4m3fn")
PARTS = (
    *(f"test_attention_differential.py::test_any_batch_equals_the_oracle[{pair}]" for pair in PAIRS),
    "test_batch_invariance.py",
    "test_cpu_append.py",
    "test_merge.py",
)
PROGRAM = """
import sys
import pytest
from fi_backend.core.jit import compiler
own, others = "-march=native", sys.argv[1].split()
at = compiler.CPU_FLAGS.index(own)
compiler.CPU_FLAGS = (*compiler.CPU_FLAGS[:at], *others, *compiler.CPU_FLAGS[at + 1 :])
assert set(others) <= set(compiler.toolchain("cpu").cxx_flags)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", *sys.argv[2:]]))
"""
# Flags in place of -march=native, and what the processor must have to run the result.
INSTRUCTION_SETS = {
    "baseline": ("-march=x86-64", ""),
    "AVX2": ("-march=x86-64-v3", "avx2"),
    "no AMX": ("-march=native -mno-amx-bf16", "amx_bf16"),
}


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--other-isa", default=False):
        pytest.skip("compiles the kernels several times; make test-isa runs it")


@pytest.mark.parametrize(("flags", "needed"), INSTRUCTION_SETS.values(), ids=INSTRUCTION_SETS)
def test_kernels_for_another_instruction_set(flags: str, needed: str) -> None:
    if platform.machine() != "x86_64" or needed not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor does not run, or does not differ from, {flags}")
    command = [sys.executable, "-c", PROGRAM, flags, *(str(TESTS / part) for part in PARTS)]
    # What was compiled for another machine has keys of its own, so the folder may be the usual one.
    environment = env.child_environment(FI_BACKEND_CACHE_DIR=str(env.cache_dir()))
    run = subprocess.run(command, cwd=TESTS.parents[1], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout.splitlines()[-1]
