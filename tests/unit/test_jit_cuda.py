# SPDX-License-Identifier: Apache-2.0
"""CUDA sources go through nvcc with an explicit target; neither compiling nor loading needs a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fi_backend.core.jit import ModuleSpec, compiler, load, toolkit
from fi_backend.errors import BuildError

KERNEL = """
__global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
int launch_fill(float* x, float value, int n) {
  fill<<<1, n>>>(x, value);
  return static_cast<int>(cudaGetLastError());
}
int target() { return TARGET; }
"""

BINDING = """
#include <tvm/ffi/function.h>
int target();
TVM_FFI_DLL_EXPORT_TYPED_FUNC(target, target);
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_cuda_module_is_compiled_for_its_arch_and_loads_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "fill.cu").write_text(KERNEL)
    (tmp_path / "binding.cc").write_text(BINDING)
    sources = (str(tmp_path / "fill.cu"), str(tmp_path / "binding.cc"))
    spec = ModuleSpec("fill", sources, defines=(("TARGET", "90"),), arch="sm_90a")
    assert load(spec).target() == 90

    [library] = (tmp_path / "cache").glob("fill-*/module.so")
    nvcc = compiler.toolchain("sm_90a").nvcc
    assert nvcc is not None
    cuobjdump = Path(nvcc).with_name("cuobjdump")
    if cuobjdump.is_file():
        listing = subprocess.run(
            [cuobjdump, "--list-elf", library], capture_output=True, text=True, check=True
        )
        assert "sm_90a" in listing.stdout


def test_without_nvcc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gxx = shutil.which("g++")
    assert gxx is not None
    (tmp_path / "g++").symlink_to(gxx)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolkit, "DEFAULT_ROOT", tmp_path)
    monkeypatch.setattr(toolkit, "_packaged", list)
    with pytest.raises(BuildError, match=r"nvcc: not found in CUDA_HOME, PATH.*pip install 'fi-backend"):
        compiler.toolchain("sm_80")
