# SPDX-License-Identifier: Apache-2.0
"""Tiny models of fixed random weights, one for each feature of an attention layer.

Their weights are large enough for soft but uneven attention, so that in float32 the log-probabilities of a
prompt tell a wrong scale, window, cap, slope or sink from the right one. Their text means nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from . import byte_tokenizer

WINDOW = 40  # tokens of every sliding window here, shorter than the prompts of the tests
MAX_POSITIONS = 2048
SPREAD = 0.15

_COMMON = {
    "vocab_size": byte_tokenizer.VOCAB_SIZE,
    "bos_token_id": byte_tokenizer.BOS,
    "eos_token_id": byte_tokenizer.EOS,
    "pad_token_id": byte_tokenizer.PAD,
    "initializer_range": SPREAD,
}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
}


def _llama(head_dim: int = 32) -> Any:
    """Grouped-query attention without anything special."""
    from transformers import LlamaConfig

    return LlamaConfig(**_LLAMA_LIKE, head_dim=head_dim)


def _mistral(head_dim: int = 80) -> Any:
    """A sliding window in every layer; a head size that is no power of two."""
    from transformers import MistralConfig

    return MistralConfig(**_LLAMA_LIKE, head_dim=head_dim, sliding_window=WINDOW)


def _gemma2(head_dim: int = 32) -> Any:
    """Soft caps, windows in every other layer, a scale that is not head_dim ** -0.5."""
    from transformers import Gemma2Config

    return Gemma2Config(
        **{**_LLAMA_LIKE, "num_hidden_layers": 4, "tie_word_embeddings": True},
        head_dim=head_dim,
        sliding_window=WINDOW,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=48,
    )


def _granite(head_dim: int = 32) -> Any:
    """Sinks in every layer, windows in two of three."""
    from transformers import GraniteConfig

    return GraniteConfig(
        **_LLAMA_LIKE,
        head_dim=head_dim,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        attention_sinks=True,
        attention_multiplier=0.2,
    )


def _bloom(head_dim: int = 32) -> Any:
    """ALiBi, multi-head attention."""
    from transformers import BloomConfig

    return BloomConfig(**_COMMON, hidden_size=8 * head_dim, n_layer=3, n_head=8, seq_length=MAX_POSITIONS)


KINDS: dict[str, Callable[..., Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "granite": _granite,
    "bloom": _bloom,
}


def make(folder: Path, kind: str, *, head_dim: int | None = None) -> None:
    """Write the model `kind` of KINDS, in float32, into `folder`; head_dim: other than the kind's own."""
    from transformers import AutoModelForCausalLM

    config = KINDS[kind]() if head_dim is None else KINDS[kind](head_dim)
    torch.manual_seed(20)
    model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    state = dict(model.state_dict())
    if kind == "granite":  # the reader in transformers knows no sinks, the engines do
        for layer in range(config.num_hidden_layers):
            state[f"model.layers.{layer}.self_attn.sinks"] = torch.randn(config.num_attention_heads) + 2
    model.save_pretrained(folder, state_dict=state)
    byte_tokenizer.write(folder, max_length=MAX_POSITIONS)
