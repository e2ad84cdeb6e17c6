# SPDX-License-Identifier: Apache-2.0
"""Modules of one machine serve on another that has neither compilers nor ninja."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fi_backend import env
from fi_backend.core import jit
from fi_backend.core.jit.toolkit import find_toolkit
from fi_backend.core.prepare import modules
from fi_backend.core.shipped import build_options, instance
from fi_backend.errors import BuildError

SPEC = instance("bfloat16", "bfloat16", (128, 128))

ATTEND = """
import sys
sys.modules["ninja"] = None
import torch
from fi_backend import AttentionSpec, BatchAttention, PageTable
spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=4)
attention = BatchAttention(spec, max_requests=1, max_tokens=1, max_kv_len=8)
block_table, kv_lens, qo_indptr = (torch.tensor(x, dtype=torch.int32) for x in ([[1]], [1], [0, 1]))
attention.plan(qo_indptr, PageTable.from_block_table(block_table, kv_lens, page_size=4))
cache = torch.randn(2, 4, 2, 64)
out = attention.run(torch.randn(1, 4, 64), cache, cache)
assert torch.allclose(out[0], cache[1, 0].repeat_interleave(2, 0)), "one visible key: its value"
print("served")
"""

LOAD = """
import sys
sys.modules["ninja"] = None
from fi_backend.core import jit
from fi_backend.core.prepare import modules
from fi_backend.core.shipped import instance
for module in modules(instance("bfloat16", "bfloat16", (128, 128)), arch="sm_90a"):
    jit.load(module)
    print(module.name)
"""


def elsewhere(wanted: list[jit.ModuleSpec], folder: Path) -> Path:
    """A copy of the built modules under keys that no compiler of this machine gives."""
    for library in jit.build_all(wanted):
        name = library.parent.name.rpartition("-")[0]
        shutil.copytree(library.parent, folder / f"{name}-0123456789abcdef")
    return folder


def run_bare(program: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with an empty PATH, so without g++, nvcc and ninja, on `cache`."""
    variables = {"PATH": "", "FI_BACKEND_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    hide = "from fi_backend.core.jit import toolkit\ntoolkit._toolkits = lambda *_: ()\n"
    return subprocess.run(
        [sys.executable, "-c", hide + program],
        env=env.child_environment(**variables),
        capture_output=True,
        text=True,
    )


def test_attention_on_a_cpu(tmp_path: Path) -> None:
    cache = elsewhere(modules(instance("float32", "float32", (64, 64)), arch="cpu"), tmp_path)
    run = run_bare(ATTEND, cache)
    assert (run.stdout.strip(), run.returncode) == ("served", 0), run.stderr
    assert "compiling" not in run.stderr


def test_cuda_modules_load_and_a_missing_one_is_named_with_its_command(tmp_path: Path) -> None:
    try:
        find_toolkit()
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    wanted = modules(SPEC, arch="sm_90a")
    cache = elsewhere(wanted, tmp_path)
    run = run_bare(LOAD, cache)
    assert (run.stdout.split(), run.returncode) == ([module.name for module in wanted], 0), run.stderr

    gone = wanted[-1]
    shutil.rmtree(cache / f"{gone.name}-0123456789abcdef")
    run = run_bare(LOAD, cache)
    assert run.returncode == 1
    for text in (
        "BuildError: g++: not found on PATH",
        f"does not hold {gone.name} (sm_90a)",
        f"fi-backend build --device cuda --arch sm_90a {build_options(SPEC)}",
    ):
        assert text in run.stderr
