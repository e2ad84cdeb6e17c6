# SPDX-License-Identifier: Apache-2.0
"""The example package as engines find it, and what a model computes with its variant according to torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recency_attention"
STRENGTH, LAYERS = 2.0, (0, 2)  # of the three layers of the random llama
ASKED = {"fi_backend": {"variant": "recency", "variant_args": {"strength": STRENGTH, "layers": list(LAYERS)}}}
TOLERANCE = 1e-3  # of a log-probability in float32


def installed(folder: Path) -> str:
    """Return a PYTHONPATH on which the example is an installed distribution; build/test_example_package.py
    installs it with pip.
    """
    record = folder / "recency_attention-0.1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: recency-attention\nVersion: 0.1.0\n")
    (record / "entry_points.txt").write_text("[fi_backend.plugins]\nrecency_attention = recency_attention\n")
    return os.pathsep.join([str(folder), str(EXAMPLE), os.environ.get("PYTHONPATH", "")])


def next_tokens(model: Path, texts: Sequence[Sequence[int]], strength: float) -> list[torch.Tensor]:
    """Return the log-probabilities [tokens, vocabulary] of what follows each token of the texts, in float64.

    strength: of the recency in LAYERS; 0: the plain model.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    def attention(
        module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _mask: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """q, k, v: [1, heads, tokens, head_dim]; returns [1, tokens, heads, head_dim]."""
        heads, tokens = q.shape[1:3]
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        power = torch.linspace(0, strength if module.layer_idx in LAYERS else 0, heads, dtype=torch.float64)
        logits = options["scaling"] * q @ k.transpose(-1, -2)
        logits = logits - power[:, None, None] * (distance.clamp(min=0) + 1.0).log()
        weights = logits.masked_fill(distance < 0, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2), None

    AttentionInterface.register("recency", attention)
    reference = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="recency", dtype=torch.float64
    )
    with torch.inference_mode():
        return [reference(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]


def check(
    model: Path, strength: float, prompts: Sequence[list[int]], tokens: Sequence[list[int]], logprobs: Any
) -> None:
    """Assert that an engine's answers are the most likely ones, and its log-probabilities the reference's.

    tokens: of the answers; logprobs: of the last tokens of each text, which is a prompt and its answer.
    """
    texts = [prompt + answer for prompt, answer in zip(prompts, tokens, strict=True)]
    following = next_tokens(model, texts, strength)
    other = next_tokens(model, texts, strength + STRENGTH / 20)
    noticed = 0.0
    for index, text in enumerate(texts):
        rows = following[index]
        at = torch.arange(len(text) - len(tokens[index]), len(text))
        margin = rows[at - 1, torch.tensor(text)[at]] - rows[at - 1].amax(1)
        assert margin.min() > -TOLERANCE, f"text {index}"
        assert _largest_error(rows, text, logprobs[index]) < TOLERANCE, f"text {index}"
        noticed = max(noticed, _largest_error(other[index], text, logprobs[index]))
    assert noticed > 10 * TOLERANCE, "a strength that is slightly off would pass"


def _largest_error(following: torch.Tensor, text: list[int], logprobs: Sequence[float]) -> float:
    at = torch.arange(len(text) - len(logprobs), len(text))
    expected = following[at - 1, torch.tensor(text)[at]]
    return float((expected - torch.tensor(logprobs, dtype=torch.float64)).abs().max())
