# SPDX-License-Identifier: Apache-2.0
"""Which of several CUDA toolkits compiles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fi_backend.core.jit import compiler, toolkit


def make(root: Path, version: int, *, include: str = "include", libraries: str = "lib64") -> Path:
    """Lay out a toolkit as far as it is looked at; returns its root."""
    for folder in ("bin", include, libraries):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    (root / "bin" / "nvcc").chmod(0o755)
    (root / include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    (root / libraries / "libcudart_static.a").touch()
    return root


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No toolkit anywhere, and a torch without CUDA."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolkit, "DEFAULT_ROOT", tmp_path / "default")
    monkeypatch.setattr(toolkit, "_packaged", list)
    monkeypatch.setattr(toolkit, "torch_cuda_major", lambda: None)


def test_order_and_the_version_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = make(tmp_path / "nvidia" / "cu13", 13000, libraries="lib")
    monkeypatch.setattr(toolkit, "_packaged", lambda: [packaged / "bin" / "nvcc"])
    toolkit._toolkits.cache_clear()
    found = toolkit.find_toolkit()
    assert (found.origin, found.major, found.library) == ("Python package", 13, packaged / "lib")

    make(tmp_path / "default", 12080)
    toolkit._toolkits.cache_clear()
    assert toolkit.find_toolkit().origin == str(tmp_path / "default")
    monkeypatch.setenv("PATH", str(make(tmp_path / "path", 12040) / "bin"))
    assert (toolkit.find_toolkit().origin, toolkit.find_toolkit().major) == ("PATH", 12)
    monkeypatch.setenv("CUDA_HOME", str(make(tmp_path / "home", 12060)))
    assert toolkit.find_toolkit().nvcc == str(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.setattr(toolkit, "torch_cuda_major", lambda: 13)
    assert toolkit.find_toolkit().origin == "Python package"
    monkeypatch.setattr(toolkit, "torch_cuda_major", lambda: 14)
    assert toolkit.find_toolkit().origin == "CUDA_HOME"


def test_a_wrapper_script_leads_to_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make(tmp_path / "cuda", 13000)
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin" / "nvcc"
    wrapper.write_text(f"#!/bin/sh\necho '#$ TOP={root}' >&2\n")
    wrapper.chmod(0o755)
    toolkit._toolkits.cache_clear()
    assert toolkit.find_toolkit().nvcc == str(root / "bin" / "nvcc")


def test_headers_of_conda_and_a_compiler_without_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = "targets/x86_64-linux/include"
    root = make(tmp_path / "conda", 12080, include=include, libraries="targets/x86_64-linux/lib")
    monkeypatch.setenv("CUDA_HOME", str(root))
    found = toolkit.find_toolkit()
    assert (found.include, found.library) == (root / include, root / "targets/x86_64-linux/lib")
    (root / include / "cuda_runtime_api.h").unlink()
    toolkit._toolkits.cache_clear()
    with pytest.raises(toolkit.MissingToolError, match="nvcc: not found in CUDA_HOME, PATH"):
        toolkit.find_toolkit()


def test_packages_of_pypi_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    make(tmp_path / "nvidia" / "cu13", 13050, libraries="lib")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert tmp_path / "nvidia" / "cu13" / "bin" / "nvcc" in toolkit._packaged()


@pytest.mark.parametrize(
    ("line", "major"), [("cuda: Optional[str] = '13.0'", 13), ("cuda = None", None), ("debug = False", None)]
)
def test_the_cuda_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, major: int | None
) -> None:
    monkeypatch.undo()
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('not to be imported')\n")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.11.0'\n{line}\n")
    monkeypatch.setattr(
        toolkit.importlib.util,
        "find_spec",
        lambda _: type("Spec", (), {"origin": str(tmp_path / "torch" / "__init__.py")})(),
    )
    toolkit.torch_cuda_major.cache_clear()
    try:
        assert toolkit.torch_cuda_major() == major
    finally:
        toolkit.torch_cuda_major.cache_clear()


def test_modules_carry_a_cuda_runtime_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(make(tmp_path / "cuda", 13000)))
    monkeypatch.setattr(compiler, "which", lambda name, _: f"/usr/bin/{name}")
    tools = compiler.toolchain("sm_90a")
    assert "-lcudart_static" in tools.link_flags
    assert "-lcudart" not in tools.link_flags
    assert f"-L{tmp_path / 'cuda' / 'lib64'}" in tools.link_flags
