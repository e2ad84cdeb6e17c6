# SPDX-License-Identifier: Apache-2.0
"""Models made on the spot, and engines run in child processes that report as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, stream

from fi_backend import env
from models import copy_llama, random_models

ENGINE_RUN = Path(__file__).with_name("engine_run.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch for the tests that install other versions of vLLM."""
    parser.addoption(
        "--vllm-versions", action="store_true", help="also run on other versions of vLLM, which are installed"
    )
    parser.addoption(
        "--vllm-runs",
        default="",
        help="of the configurations on a GPU, only those whose name contains one of these texts, parted by ;",
    )
    parser.addoption(
        "--vllm-limit", type=float, help="seconds after which no further configuration is begun on a GPU"
    )
    parser.addoption("--sglang-runs", default="", help="the same for SGLang")
    parser.addoption(
        "--sglang-limit", default="240", help="seconds after which an engine of SGLang is killed"
    )


@pytest.fixture(scope="session")
def copy_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the function (head_dim) -> folder of copy-llama."""
    root = tmp_path_factory.mktemp("copy-llama")

    @cache
    def make(head_dim: int = 64) -> Path:
        folder = root / str(head_dim)
        copy_llama.make(folder, head_dim=head_dim)
        return folder

    return make


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the function (kind, head_dim=None) -> folder of a model of fixed random weights."""
    root = tmp_path_factory.mktemp("random")

    @cache
    def make(kind: str, head_dim: int | None = None) -> Path:
        folder = root / f"{kind}-{head_dim}"
        random_models.make(folder, kind, head_dim=head_dim)
        return folder

    return make


@pytest.fixture(scope="session")
def chosen_runs(pytestconfig: pytest.Config) -> Callable[[Iterable[str]], list[str]]:
    """Return the function (names of runs) -> those that --vllm-runs chooses."""
    wanted = pytestconfig.getoption("--vllm-runs").split(";")
    return lambda names: [name for name in names if any(text in name for text in wanted)]


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return the function (*runs, ...) -> one result a run; see engine_run.py.

    in_process: the engine core lives in the process that asks, so that all runs share one import of vLLM;
    environment: added to ours; command: of the interpreter; preload: modules to install first;
    keep_going: a run that fails becomes {"error": its traceback}, and the later ones follow;
    seconds: after which no further run is begun. A line for each run is printed when it is over (pytest -s).
    """
    pytest.importorskip("vllm", reason="vLLM is not installed")

    def run(
        *runs: Mapping[str, Any],
        in_process: bool = True,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = (sys.executable,),
        preload: Sequence[str] = (),
        keep_going: bool = False,
        seconds: float | None = None,
        timeout: float = 3600,
    ) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("engine")
        job, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
        job.write_text(
            json.dumps({"preload": preload, "keep_going": keep_going, "seconds": seconds, "runs": runs})
        )
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "OMP_NUM_THREADS": "2",  # vLLM would serve with one thread
            "OMP_WAIT_POLICY": "passive",  # else each idle thread spins on a core that the other one needs
        }
        status = stream(
            [*command, str(ENGINE_RUN), str(job), str(result)],
            env.child_environment(**{**settings, **(environment or {})}),
            log,
            timeout,
        )
        text = log.read_text(errors="replace")
        results = json.loads(result.read_text()) if result.exists() else []
        why = f"engine_run.py ended with status {status}:\n{text[-6000:]}"
        assert status == 0 or (keep_going and results), why
        # Where the process was ended, so were the runs that it had not finished.
        results += [{"error": why}] * (len(runs) - len(results))
        for each in results:
            each["log"] = text
        return results

    return run
