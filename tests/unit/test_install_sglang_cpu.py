# SPDX-License-Identifier: Apache-2.0
"""The script that installs SGLang for the CPU: what it takes out of a wheel, and what it replaces."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_sglang_cpu.py"


def wheel_of(folder: Path, version: str, module: str) -> Path:
    wheel = folder / f"sglang-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"sglang/{module}.py", "")
        archive.writestr("tools/helper.py", "")
        archive.writestr(
            f"sglang-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        )
    return wheel


def test_a_version_is_unpacked_in_place_of_the_one_before(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("install_sglang_cpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    site = tmp_path / "site"
    site.mkdir()
    for version, module in (("0.5.17", "old"), ("0.5.23", "new")):
        script.unpack(wheel_of(tmp_path, version, module), site)
    found = importlib.metadata.distributions(name="sglang", path=[str(site)])
    assert [each.version for each in found] == ["0.5.23"]
    assert sorted(path.name for path in site.iterdir()) == ["sglang", "sglang-0.5.23.dist-info"]
    assert [path.name for path in (site / "sglang").iterdir()] == ["new.py"]
