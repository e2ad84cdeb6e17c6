# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder that any Hugging Face based engine opens, without importing transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from . import byte_tokenizer


def save(folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Write config.json, model.safetensors and the byte tokenizer into `folder`.

    config: the Hugging Face configuration; weights: state dict, stored as config["dtype"].
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["dtype"])
    tensors = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokens = {
        "vocab_size": byte_tokenizer.VOCAB_SIZE,
        "bos_token_id": byte_tokenizer.BOS,
        "eos_token_id": byte_tokenizer.EOS,
        "pad_token_id": byte_tokenizer.PAD,
    }
    (folder / "config.json").write_text(json.dumps({**tokens, **config}, indent=2) + "\n")
    byte_tokenizer.write(folder, max_length=config["max_position_embeddings"])


def llama_config(**overrides: Any) -> dict[str, Any]:
    """Return the configuration of a Llama; both spellings of the RoPE base, for old and new readers."""
    theta = overrides.pop("rope_theta", 10000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "dtype": "bfloat16",
        "torch_dtype": overrides.get("dtype", "bfloat16"),
        **overrides,
    }
