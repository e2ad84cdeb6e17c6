# SPDX-License-Identifier: Apache-2.0
"""The array path in processes of its own: torch stays out, also where it could not come in."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NONE = "import sys\nsys.modules['torch'] = None\n"  # what the import system takes for not installed
_CHECK = "\nimport sys\nassert sys.modules.get('torch') is None, 'torch was imported'\n"


# What the path needs of the installed distributions; rich is for the progress of a build.
_NEEDED = ("apache-tvm-ffi", "filelock", "ml_dtypes", "ninja", "numpy", "pluggy", "rich", "typing-extensions")


def run(program: str, *options: str, **environment: str) -> None:
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def page(*without: str) -> str:
    """The Python of the page, but for blocks that import a library of `without`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "arrays.md").read_text(), re.M | re.S)
    assert len(blocks) >= 5
    return "\n".join(
        b for b in blocks if not any(re.search(rf"^import {name}\b", b, re.M) for name in without)
    )


@pytest.mark.parametrize("start", ["", _NONE], ids=["installed", "not installed"])
def test_the_page_runs_without_torch(start: str) -> None:
    pytest.importorskip("jax")
    run(start + page("cupy") + _CHECK)


def test_the_page_runs_beside_what_it_needs_alone(tmp_path: Path) -> None:
    """An installation in which torch was left out."""
    for name in _NEEDED:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(str(distribution.locate_file(top)))
    program = "import importlib.util\nassert importlib.util.find_spec('torch') is None\n"
    run(program + page("cupy", "jax"), "-S", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")


def test_everything_is_imported_without_torch_and_without_an_array_library() -> None:
    program = """
import importlib, pkgutil, sys
import fi_backend

arrays = fi_backend.arrays
for name in arrays.__all__:
    assert getattr(arrays, name).__name__ == name
for module in pkgutil.iter_modules(arrays.__path__):
    importlib.import_module(f"fi_backend.arrays.{module.name}")
heavy = ("torch", "jax", "cupy", "ml_dtypes", "vllm", "sglang")
assert not any(map(sys.modules.get, heavy)), sorted(sys.modules)
"""
    run(program)
    run(_NONE + program)


def test_torch_may_come_later() -> None:
    """A tvm-ffi that was imported without torch then serves its tensors, with the same bits."""
    run(
        """
import sys
import numpy as np
from fi_backend import AttentionSpec, arrays

spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=16)
limits = dict(max_requests=1, max_tokens=4, max_kv_len=64)
random = np.random.default_rng(0)
q = random.standard_normal((4, 4, 64), np.float32)
k, v = random.standard_normal((2, 3, 16, 2, 64), np.float32)
index = [np.array(x, np.int32) for x in ([0, 4], [[2, 0, 1]], [44])]

def outputs(module, *tensors):
    q, k, v, starts, pages, lens = tensors
    attention = module.BatchAttention(spec, **limits)
    attention.plan(starts, module.PageTable.from_block_table(pages, lens, page_size=16))
    return attention.run(q, k, v)

ours = outputs(arrays, q, k, v, *index)
assert "torch" not in sys.modules
import torch
import fi_backend

theirs = outputs(fi_backend, *map(torch.from_numpy, (q, k, v, *index)))
assert isinstance(theirs, torch.Tensor) and (theirs.numpy() == ours).all() and np.abs(ours).max() > 0.1
lse = torch.zeros(4, 4)
assert fi_backend.merge_state(theirs, lse, theirs, lse)[0].allclose(theirs, atol=1e-6)
"""
    )


def test_another_thread_can_import_torch_meanwhile() -> None:
    """Only the thread that imports tvm-ffi is told that there is no torch."""
    run(
        """
import sys, threading
import fi_backend.core.jit.ffi as ffi

found = []
with ffi._without_torch():
    def look():
        import importlib.util
        found.append(importlib.util.find_spec("torch") is not None)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    try:
        import torch
    except ModuleNotFoundError:
        found.append("hidden")
assert found == [True, "hidden"], found
assert not any(isinstance(finder, ffi._Hidden) for finder in sys.meta_path)
"""
    )
