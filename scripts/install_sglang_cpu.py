# SPDX-License-Identifier: Apache-2.0
"""Install what runs SGLang on a CPU into an environment over this one, which has torch:
`install_sglang_cpu.py VERSION FOLDER`.

SGLang and vLLM want different versions of what both use; all else is shared with this environment.
A plain `pip install sglang` would bring the whole CUDA stack. And its wheels are for one version of Python,
though all that runs on a CPU is Python: they are unpacked. What SGLang imports besides, `sgl_kernel` and
`torchvision`, has stand-ins in tests/sglang_stubs, to be put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import overlay_env

# Of the wheel: the Python and the platform that it names; neither matters here.
WHEEL_OF = ("--python-version", "3.12", "--platform", "manylinux_2_34_x86_64")
REQUIREMENTS = (
    "numpy<2.4",  # the interpreter of this Triton reads names that later versions lack
    "triton==3.6.0",  # its allocator of pages is a Triton kernel, which is interpreted on a CPU
    "transformers==5.12.1",
    "openai==2.6.1",
    "datasets==4.0.0",
    "aiohttp",
    "compressed-tensors",
    "distro",
    "einops",
    "fastapi",
    "gguf",
    "interegular",
    "ipython",
    "msgspec",
    "ninja",
    "nvidia-ml-py",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "prometheus-client",
    "psutil",
    "pybase64",
    "pydantic",
    "python-multipart",
    "pyzmq",
    "requests",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "tiktoken",
    "tqdm",
    "uvicorn",
    "uvloop",
    "watchfiles",
    "xxhash",
    "zstandard",
)
# With their own requirements they would replace torch or Triton.
ALONE = (
    "xgrammar==0.2.1",
    "torch-memory-saver",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
)


def pip(python: Path, *arguments: str) -> None:
    """Run pip for an environment; a failure ends the program with pip's own message above."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"SGLang is not installed: failed: {' '.join(command)}")


def unpack(wheel: Path, site: Path) -> None:
    """Put the package and its record of a wheel of SGLang into `site`, in place of another version's."""
    for old in (site / "sglang", *site.glob("sglang-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name
            for name in archive.namelist()
            if name.startswith("sglang/") or name.partition("/")[0].endswith(".dist-info")
        ]
        archive.extractall(site, wanted)


def main() -> None:
    """Install the version given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="version of sglang, for example 0.5.17")
    parser.add_argument("folder", type=Path, help="of the environment, made where there is none")
    chosen = parser.parse_args()
    python = overlay_env.make(chosen.folder)
    wanted = f"sglang=={chosen.version}"
    with tempfile.TemporaryDirectory() as folder:
        print(f"{wanted}: fetching the wheel", flush=True)
        pip(python, "download", "--no-deps", "--only-binary=:all:", *WHEEL_OF, "-d", folder, wanted)
        [wheel] = Path(folder).glob("*.whl")
        print(f"{wanted}: installing its requirements (about a minute)", flush=True)
        # That packages of the environment below would want other versions does not matter.
        pip(python, "install", "--no-warn-conflicts", *REQUIREMENTS)
        pip(python, "install", "--no-deps", *ALONE)
        unpack(wheel, overlay_env.packages(python))
    print(f"{wanted}: installed in {chosen.folder}", flush=True)


if __name__ == "__main__":
    main()
