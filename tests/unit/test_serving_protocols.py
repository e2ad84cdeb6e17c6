# SPDX-License-Identifier: Apache-2.0
"""What is posted for a request: the tokens, their number, how they are drawn."""

from __future__ import annotations

import pytest

from fi_backend.benchmarks.serving.protocols import OpenAiCompletions, Protocol, Request, SglangGenerate


@pytest.mark.parametrize("protocol", [OpenAiCompletions(), SglangGenerate()])
@pytest.mark.parametrize("samples", [1, 4])
def test_samples_are_drawn_without_a_seed(protocol: Protocol, samples: int) -> None:
    """vLLM samples seeded requests one row after another: time that no attention back end can save."""
    body = protocol.body("m", Request([5, 6], 7, samples=samples))
    sampling = body.get("sampling_params", body)
    assert not {key for keys in (body, sampling) for key in keys if "seed" in key}
    assert (sampling["temperature"], sampling.get("n", 1)) == ((0, 1) if samples == 1 else (1.0, samples))
    assert sampling.get("max_tokens", sampling.get("max_new_tokens")) == 7
    assert body.get("prompt", body.get("input_ids")) == [5, 6]
