# SPDX-License-Identifier: Apache-2.0
"""The model that is served: a folder, a name that the engine resolves, or one made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.models import copy_llama, dummy_llama

MADE = ("copy-llama", *(f"dummy:{shape}" for shape in dummy_llama.SHAPES))
_UNKNOWN_VOCABULARY = 32000


@dataclass(frozen=True)
class ServedModel:
    """name: what the engine is told. shown: what the user wrote. dummy: it has no weights.

    vocabulary: size. kv: (layers, KV heads, head size) and query heads, where the configuration says so.
    """

    name: str
    shown: str
    dummy: bool
    vocabulary: int
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int | None:
        """Return the bytes of K and V of one token in all layers, or None where the shape is not known."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


def prepare_model(text: str, folder: Path) -> ServedModel:
    """Return the model that `text` names, making it in `folder` if it is one of MADE.

    Raises ValueError for a folder without config.json, and for dummy:SHAPE with an unknown shape.
    """
    if text.startswith("dummy:") and text not in MADE:
        raise ValueError(f"model: expected one of {', '.join(MADE)}, a folder or a name; got {text!r}.")
    if text in MADE:
        target = folder / text.replace(":", "-")
        if text == "copy-llama":
            copy_llama.make(target)
        else:
            dummy_llama.make(target, text.partition(":")[2])
        return _described(str(target), text, text != "copy-llama", target)
    if Path(text).is_dir():
        return _described(text, text, False, Path(text))
    return ServedModel(text, text, False, _UNKNOWN_VOCABULARY)


def _described(name: str, shown: str, dummy: bool, folder: Path) -> ServedModel:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model: expected a folder with config.json; got {shown!r}.")
    config: Mapping[str, Any] = json.loads(path.read_text())
    config = config.get("text_config", config)
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else None)
    return ServedModel(
        name,
        shown,
        dummy,
        int(config.get("vocab_size", _UNKNOWN_VOCABULARY)),
        config.get("num_hidden_layers"),
        heads,
        config.get("num_key_value_heads") or heads,
        head_dim,
    )
