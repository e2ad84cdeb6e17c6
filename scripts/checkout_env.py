# SPDX-License-Identifier: Apache-2.0
"""Prints the environment in which this checkout serves under an engine that is only unpacked, not installed.

    eval "$(python3 scripts/checkout_env.py --engine FOLDER)"

An engine finds its plug-ins by the metadata of installed packages, which a checkout does not have: a folder
with that metadata and nothing else is written to `--metadata` and put on PYTHONPATH beside the checkout.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, action="append", default=[], help="folder on PYTHONPATH")
    parser.add_argument("--metadata", type=Path, default=ROOT / "build" / "checkout")
    chosen = parser.parse_args()
    write_metadata(chosen.metadata)
    path = [*map(str, chosen.engine), str(chosen.metadata), str(ROOT)]
    if inherited := os.environ.get("PYTHONPATH"):
        path.append(inherited)
    settings = {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's sampler is compiled on first use, which takes minutes.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # An engine that is unpacked has no versions that SGLang could compare.
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }
    for name, value in settings.items():
        print(f"export {name}={shlex.quote(value)}")


def write_metadata(folder: Path) -> Path:
    """Write the metadata of this checkout into `folder` and return the dist-info folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


if __name__ == "__main__":
    main()
