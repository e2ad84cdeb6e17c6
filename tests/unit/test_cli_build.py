# SPDX-License-Identifier: Apache-2.0
"""`fi-backend build`: which modules, and what it says about them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fi_backend.cli import build as build_module
from fi_backend.cli import modules
from fi_backend.cli.main import app
from fi_backend.cli.shell import InputError
from fi_backend.core import prepare
from fi_backend.core.jit import ModuleSpec
from fi_backend.core.shipped import VARIANTS, build_options, instance, shipped, variant_of

RUN = CliRunner()
_SOURCE = """
#include <tvm/ffi/tvm_ffi.h>
TVM_FFI_DLL_EXPORT_TYPED_FUNC(one, [] { return 1; });
"""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Instead of compiling, what would have been: names by target, folder and portable."""
    seen: dict[str, Any] = {}

    def record(wanted: list[ModuleSpec], folder: Path, portable: bool) -> None:
        for module in wanted:
            seen.setdefault(module.arch, []).append(module.name)
        seen.update(folder=folder, portable=portable)

    monkeypatch.setattr(build_module, "_build", record)
    return seen


def test_modules_of_dtypes(asked: dict[str, Any]) -> None:
    command = ["build", "--dtype", "bfloat16,float32", "--kv-dtype", "auto", "--kv-dtype", "float8_e5m2"]
    assert RUN.invoke(app, command).exit_code == 0
    assert asked["cpu"] == [
        "planner",
        "cpu_ops",
        "cpu_attention_bfloat16_bfloat16",
        "cpu_attention_bfloat16_float8_e5m2",
        "cpu_attention_float32_float32",
        "cpu_attention_float32_float8_e5m2",
    ]


def test_the_default_is_all_dtypes_for_this_processor(asked: dict[str, Any], tmp_path: Path) -> None:
    assert RUN.invoke(app, ["build", "--cache", str(tmp_path / "c")]).exit_code == 0
    assert len(asked["cpu"]) == 5
    assert (asked["portable"], asked["folder"]) == (False, tmp_path / "c")
    assert RUN.invoke(app, ["build", "--portable"]).exit_code == 0
    assert asked["portable"] is True


def test_cuda_without_options_is_the_shipped_list_for_each_target(asked: dict[str, Any]) -> None:
    result = RUN.invoke(app, ["build", "--device", "cuda", "--arch", "sm_80,sm_90a"])
    assert result.exit_code == 0, result.stderr
    assert asked["cpu"] == ["planner"]
    assert asked["sm_80"] == asked["sm_90a"]
    attention = [name for name in asked["sm_90a"] if name.startswith("cuda_attention")]
    assert len(attention) == len(shipped())
    assert "cuda_ops" in asked["sm_90a"]


def test_cuda_options_choose_from_the_shipped_list_or_name_others(asked: dict[str, Any]) -> None:
    cuda = ["build", "--device", "cuda", "--arch", "sm_90a"]
    assert RUN.invoke(app, [*cuda, "--dtype", "bfloat16", "--variant", "alibi"]).exit_code == 0
    chosen = [name for name in asked["sm_90a"] if name.startswith("cuda_attention")]
    assert len(chosen) == 3, "ALiBi shares the modules of soft caps"
    asked.clear()
    options = "--dtype float16 --kv-dtype float8_e5m2 --head-dim 192x128,80 --variant soft-cap+custom-mask"
    assert RUN.invoke(app, [*cuda, *options.split()]).exit_code == 0
    assert [name for name in asked["sm_90a"] if "attention" in name] == [
        module.name
        for dims in ((192, 128), (80, 80))
        for module in prepare.modules(
            instance("float16", "float8_e5m2", dims, "custom-mask+alibi"), arch="sm_90a"
        )
        if "attention" in module.name
    ]


@pytest.mark.parametrize("spec", shipped(), ids=build_options)
def test_the_options_that_an_error_names_make_that_module(spec: Any, asked: dict[str, Any]) -> None:
    command = ["build", "--device", "cuda", "--arch", "sm_90a", *build_options(spec).split()]
    assert RUN.invoke(app, command).exit_code == 0
    assert asked["sm_90a"] == [
        module.name for module in prepare.modules(spec, arch="sm_90a") if module.arch != "cpu"
    ]


def test_every_variant_is_its_own_module_but_for_the_two_transforms() -> None:
    names = {name: variant_of(instance("bfloat16", "bfloat16", (64, 64), name)) for name in VARIANTS}
    assert names.pop("alibi") == "soft-cap"
    assert all(name == variant for name, variant in names.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device tpu", "--device: expected cpu or cuda; got 'tpu'"),
        ("--arch sm_90a", "--arch: expected only with --device cuda; got sm_90a"),
        ("--head-dim 64", "--head-dim: expected only with --device cuda; got 64"),
        ("--device cuda --arch sm_75", "--arch: expected any of sm_80, "),
        ("--device cuda --arch sm_80 --head-dim 64x", "--head-dim: expected a number, or K and V"),
        ("--device cuda --arch sm_80 --head-dim 72", "head_dim, head_dim_v: on CUDA expected one of 64"),
        ("--device cuda --arch sm_80 --head-dim 64 --dtype float32", "dtype: on CUDA expected float16 or"),
        ("--device cuda --arch sm_80 --variant cap", "--variant: expected standard, soft-cap"),
        ("--device cuda --arch sm_80 --dtype float32", "no shipped instance matches these options"),
    ],
)
def test_mistakes(options: str, message: str) -> None:
    result = RUN.invoke(app, ["build", *options.split()])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}"), result.stderr


def test_without_a_device_the_target_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match="--arch: no CUDA device is here to take it from"):
        build_module._archs_here()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        "fi_backend.core.jit.arch.cuda_arch", lambda index: ["sm_90a", "sm_80", "sm_90a"][index]
    )
    assert build_module._archs_here() == ["sm_90a", "sm_80"]


def test_first_it_compiles_then_it_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "one.cc"
    source.write_text(_SOURCE)
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path / "unused"))
    spec = ModuleSpec(name="tiny", sources=(str(source),))
    monkeypatch.setattr(prepare, "modules", lambda *_, **__: [spec])
    command = ["build", "--cache", str(tmp_path / "cache")]
    first = RUN.invoke(app, command, env={"COLUMNS": "120"})
    assert first.exit_code == 0, first.stderr
    assert re.search(r"^tiny +cpu +[0-9a-f]{16} +\d+ +compiled$", first.stdout, re.MULTILINE)
    assert re.search(r"1 modules ready, 1 compiled in \d+\.\d s; cache: ", first.stdout)
    second = RUN.invoke(app, command, env={"COLUMNS": "120"})
    assert re.search(r"^tiny +cpu +[0-9a-f]{16} +\d+ +in the cache$", second.stdout, re.MULTILINE)
    assert "1 modules ready, 0 compiled; cache: " in second.stdout
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["cache"]
    assert len(modules.cached_modules(tmp_path / "cache")) == 1


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    result = RUN.invoke(app, ["build"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: g++: not found on PATH; install GCC")


def test_a_bad_cache_folder_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_CACHE_DIR", "relative")
    result = RUN.invoke(app, ["build"])
    assert result.exit_code == 2
    assert "FI_BACKEND_CACHE_DIR: expected an absolute path" in result.stderr
