# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Llama without weights, for `--load-format dummy --skip-tokenizer-init`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import checkpoint

SHAPES: dict[str, dict[str, Any]] = {
    # Llama-3.1-8B
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 510,
        "eos_token_id": 511,
    },
}


def make(folder: Path, shape: str) -> int:
    """Write config.json of a name of SHAPES and return its number of layers."""
    config = checkpoint.llama_config(**SHAPES[shape])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return int(config["num_hidden_layers"])
