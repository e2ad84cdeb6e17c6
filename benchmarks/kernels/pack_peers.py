# SPDX-License-Identifier: Apache-2.0
"""pack_peers.py ARCHIVE [--work DIR]: the peers of `bench kernels --device cuda` in one file.

For a machine without a registry. Downloads the wheels of vLLM, FlashInfer, SGLang and tvm-ffi for Linux
x86-64 and CPython 3.12, keeps what the benchmark calls, compiles FlashInfer's modules for sm_90a into the
folder where it looks for ready-made ones, and packs all of it (under 60 MB). Needs nvcc and ninja, and a
Python with torch, tvm-ffi of the same version, and FlashInfer's other imports. Wheels and modules in DIR that
exist already are taken as they are.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from fi_backend.core.jit import compiler, tools

WHEELS = {
    "vllm": "vllm==0.26.0",
    "flashinfer": "flashinfer-python==0.6.14",
    "sglang": "sglang==0.5.17",
    "tvm_ffi": "apache-tvm-ffi==0.1.15.post2",
    "pynvml": "nvidia-ml-py==13.615.71",
    "curand": "nvidia-curand==10.4.5.25",
}
GLIBC = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34", "2_35")
FA3 = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
SGLANG_KERNELS = "sglang/kernels/ops/attention"
# The rest of SGLang would need its own kernel package; the Triton files ask for these three answers alone.
SGLANG_UTILS = '"""Stands for SGLang\'s utilities."""\n' + "".join(
    f"\n\ndef {name}():\n    return {answer}\n"
    for name, answer in (("is_cuda", True), ("is_hip", False), ("is_gfx95_supported", False))
)
# FlashInfer's generators and the arguments with which its wrappers ask for these modules.
GENERATE = """
import sys, torch
from flashinfer.jit.attention import modules as m
from flashinfer.jit.cascade import gen_cascade_module
bf16, i32, plain = torch.bfloat16, torch.int32, (128, 128, 0, False, False)
prefill = lambda backend, kv: m.gen_batch_prefill_module(backend, bf16, kv, bf16, i32, *plain, False)
for spec in (
    prefill("fa2", bf16), prefill("fa2", torch.float8_e4m3fn), prefill("fa3", bf16), gen_cascade_module(),
    m.gen_batch_decode_module(bf16, bf16, bf16, i32, *plain),
    m.gen_batch_attention_module(bf16, bf16, bf16, i32, *plain),
):
    spec.write_ninja()
    print("MODULE", spec.build_dir)
"""
# Kernels that the benchmark never launches: contiguous KV, and custom masks.
UNUSED = ("ragged", "mask_2", "mask_3")


def main() -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fi_backend_peers")
    arguments = parser.parse_args()
    wheels = {name: unpacked(name, arguments.work) for name in WHEELS}
    modules = compiled(wheels, arguments.work)
    stage = arguments.work / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    collect(wheels, modules, stage)
    with (
        lzma.open(arguments.archive, "wb", preset=6) as stream,
        tarfile.open(fileobj=stream, mode="w|") as tar,
    ):
        tar.add(stage, ".")
    print(arguments.archive, arguments.archive.stat().st_size)


def unpacked(name: str, work: Path) -> Path:
    """Download and unpack a wheel unless it is there; return its folder."""
    folder = work / "wheels" / name
    if not folder.is_dir():
        platforms = [f"manylinux_{version}_x86_64" for version in GLIBC]
        platforms += ["manylinux1_x86_64", "manylinux2014_x86_64", "any"]
        download = work / "downloads" / name
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", "3.12", "--implementation", "cp"]
        command += [part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)]
        command += [part for platform in platforms for part in ("--platform", platform)]
        subprocess.run([*command, "-d", str(download), WHEELS[name]], check=True)
        [wheel] = download.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        shutil.rmtree(download)
    return folder


def compiled(wheels: dict[str, Path], work: Path) -> list[Path]:
    """Compile FlashInfer's modules; return the libraries."""
    nvcc = compiler.toolchain("sm_90a").nvcc
    assert nvcc is not None
    cuda = Path(nvcc).resolve().parent.parent
    path = work / "python"
    path.mkdir(parents=True, exist_ok=True)
    for source in (*wheels["flashinfer"].glob("flashinfer*"), *wheels["pynvml"].glob("*.py")):
        if not (path / source.name).exists():
            (path / source.name).symlink_to(source.resolve())
    # The driver's library need not be here; the modules only name it.
    stub = work / "stub"
    stub.mkdir(exist_ok=True)
    (stub / "empty.c").write_text("\n")
    subprocess.run(
        ["gcc", "-shared", "-o", stub / "libcuda.so", "-Wl,-soname,libcuda.so.1", stub / "empty.c"],
        check=True,
    )
    [curand] = wheels["curand"].glob("**/curand_kernel.h")
    environment = {
        **os.environ,
        "PYTHONPATH": str(path),
        "CUDA_HOME": str(cuda),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(work / "flashinfer"),
        "NVCC_APPEND_FLAGS": f"-I{curand.parent}",
    }
    run = subprocess.run(
        [sys.executable, "-c", GENERATE], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    folders = [Path(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("MODULE ")]
    return [linked(folder, cuda, stub, environment) for folder in folders]


def linked(folder: Path, cuda: Path, stub: Path, environment: dict[str, str]) -> Path:
    """Compile a module's used objects and link them; functions of the others stay undefined, uncalled."""
    library = folder / f"{folder.name}.so"
    if not library.is_file():
        targets = [
            line.split()[1].rstrip(":")
            for line in (folder / "build.ninja").read_text().splitlines()
            if line.startswith("build ") and ".o: " in line and not any(name in line for name in UNUSED)
        ]
        subprocess.run([tools.ninja_binary(), "-C", folder, *targets], env=environment, check=True)
        libraries = [f"-L{cuda / 'lib64'}", f"-L{stub}", "-lcudart", "-lcuda"]
        subprocess.run(["g++", "-shared", *targets, *libraries, "-o", library], check=True)
    return library


def collect(wheels: dict[str, Path], modules: list[Path], stage: Path) -> None:
    """Copy what the benchmark imports and calls into `stage`."""

    def copy(source: Path, name: str) -> None:
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, stage / name)

    # In a folder of its own: a package `vllm` with one file in it would look like a broken vLLM.
    (stage / "fa3").mkdir(parents=True)
    shutil.copy(wheels["vllm"] / FA3, stage / "fa3")
    for folder in (wheels[name] for name in ("vllm", "flashinfer", "sglang", "tvm_ffi")):
        for metadata in folder.glob("*.dist-info/METADATA"):
            copy(folder, str(metadata.relative_to(folder)))
    shutil.copytree(
        wheels["flashinfer"] / "flashinfer",
        stage / "flashinfer",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for headers in ("cutlass", "cccl", "spdlog"):
        shutil.rmtree(stage / "flashinfer" / "data" / headers)
    for library in modules:
        target = stage / "flashinfer" / "data" / "aot" / library.stem / library.name
        target.parent.mkdir(parents=True)
        shutil.copy(library, target)
    copy(wheels["pynvml"], "pynvml.py")
    shutil.copytree(wheels["tvm_ffi"] / "tvm_ffi", stage / "tvm_ffi")
    for name in ("decode_attention", "extend_attention", "prefill_attention", "score_mod"):
        copy(wheels["sglang"], f"{SGLANG_KERNELS}/{name}.py")
    for package in ("sglang", "sglang/kernels", "sglang/kernels/ops", SGLANG_KERNELS, "sglang/srt"):
        (stage / package).mkdir(parents=True, exist_ok=True)
        (stage / package / "__init__.py").write_text("")
    (stage / "sglang" / "srt" / "utils.py").write_text(SGLANG_UTILS)


if __name__ == "__main__":
    main()
