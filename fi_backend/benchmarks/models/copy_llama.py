# SPDX-License-Identifier: Apache-2.0
"""copy-llama: a Llama with weights set by hand that continues a text from its earlier occurrence.

Layer 0 has three heads that look exactly 1, 2 and 3 tokens back, by the phase of RoPE, and note those
tokens' codes in the residual stream. Layer 1 finds the position whose three previous tokens are the last
three tokens of the text, and copies the token found there. So greedy decoding repeats the text, with a
logit margin of 10 at every step whatever the correct kernel or the dtype, and a KV page that is lost,
stale or swapped shows as a wrong text. It cannot show small numeric errors: its attention is one-hot.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch

from . import checkpoint
from .byte_tokenizer import BOS, VOCAB_SIZE

HIDDEN = 64
BITS = 9  # of a token's code: every token id is below 2**9
MAX_POSITIONS = 8192
ROPE_BASE = 1e12
LOGIT = 5.0  # per bit of the code; the margin is twice that

# Channels of the residual stream: this token's code, a constant one, the codes of the tokens 1, 2 and 3
# back, and the code of the answer.
TOKEN, ONE = 0, BITS
BACK = tuple(ONE + 1 + BITS * i for i in range(3))
ANSWER = BACK[-1] + BITS

ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;"


def weights(*, head_dim: int = 64, heads: int = 4, kv_heads: int = 2) -> dict[str, torch.Tensor]:
    """Return the state dict. head_dim: 64, 128 or 256; heads: at least 3, a multiple of kv_heads."""
    if head_dim not in (64, 128, 256):
        raise ValueError(f"head_dim: expected 64, 128 or 256, got {head_dim}")
    if heads < 3 or heads % kv_heads:
        raise ValueError(f"heads: expected at least 3 and a multiple of kv_heads={kv_heads}, got {heads}")
    codes = torch.tensor(
        [[1.0 if token >> bit & 1 else -1.0 for bit in range(BITS)] for token in range(VOCAB_SIZE)]
    )
    embedding = torch.zeros(VOCAB_SIZE, HIDDEN)
    embedding[:, TOKEN : TOKEN + BITS] = codes
    embedding[:, ONE] = 1
    head = torch.zeros(VOCAB_SIZE, HIDDEN)
    head[:, ANSWER : ANSWER + BITS] = LOGIT * codes
    state = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for layer, attention in enumerate(
        (_look_back(head_dim, heads, kv_heads), _find_match(head_dim, heads, kv_heads))
    ):
        prefix = f"model.layers.{layer}"
        state |= {f"{prefix}.self_attn.{name}.weight": weight for name, weight in attention.items()}
        state[f"{prefix}.mlp.gate_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        state[f"{prefix}.mlp.up_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        state[f"{prefix}.mlp.down_proj.weight"] = torch.zeros(HIDDEN, HIDDEN)
        state[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    # With n channels of +-1 the RMS norm divides by sqrt(n / HIDDEN); its weight undoes that.
    for name, channels in (
        ("model.layers.0.input_layernorm", BITS + 1),
        ("model.layers.1.input_layernorm", 4 * BITS + 1),
        ("model.norm", 5 * BITS + 1),
    ):
        state[f"{name}.weight"] = torch.full((HIDDEN,), math.sqrt(channels / HIDDEN))
    return state


def _projections(head_dim: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    return {
        "q_proj": torch.zeros(heads * head_dim, HIDDEN),
        "k_proj": torch.zeros(kv_heads * head_dim, HIDDEN),
        "v_proj": torch.zeros(kv_heads * head_dim, HIDDEN),
        "o_proj": torch.zeros(HIDDEN, heads * head_dim),
    }


def _look_back(head_dim: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Heads 0, 1, 2 attend to the token 1, 2, 3 back: the query is a constant turned by that many steps."""
    half = head_dim // 2
    gain = math.sqrt(280 * math.sqrt(head_dim / 64))
    pairs = [i * head_dim // 64 for i in range(12)]  # the same twelve fast frequencies at every head size
    p = _projections(head_dim, heads, kv_heads)
    for kv_head in range(kv_heads):
        for i in pairs:
            p["k_proj"][kv_head * head_dim + i, ONE] = gain
        for bit in range(BITS):
            p["v_proj"][kv_head * head_dim + bit, TOKEN + bit] = 1
    for back, channel in enumerate(BACK, start=1):
        row = (back - 1) * head_dim
        for i in pairs:
            angle = back * ROPE_BASE ** (-2 * i / head_dim)
            p["q_proj"][row + i, ONE] = gain * math.cos(angle)
            p["q_proj"][row + i + half, ONE] = -gain * math.sin(angle)
        for bit in range(BITS):
            p["o_proj"][channel + bit, row + bit] = 1
    return p


def _find_match(head_dim: int, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """Head 0 attends to the position whose three previous tokens are this token and the two before it."""
    half = head_dim // 2
    gain = 8.0 * (head_dim / 64) ** 0.25
    # RoPE hardly turns the slowest pairs over MAX_POSITIONS tokens, so distance does not matter.
    slow = [i for pair in range(half - 1, half - 15, -1) for i in (pair, pair + half)][: 3 * BITS]
    p = _projections(head_dim, heads, kv_heads)
    for n, (queried, kept) in enumerate(zip((TOKEN, BACK[0], BACK[1]), BACK, strict=True)):
        for bit in range(BITS):
            p["q_proj"][slow[n * BITS + bit], queried + bit] = gain
            p["k_proj"][slow[n * BITS + bit], kept + bit] = gain
    for bit in range(BITS):
        p["v_proj"][bit, TOKEN + bit] = 1
        p["o_proj"][ANSWER + bit, bit] = 1
    return p


def make(folder: Path, *, head_dim: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
    """Write the model folder, in bfloat16."""
    config = checkpoint.llama_config(
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=ROPE_BASE,
        rms_norm_eps=1e-6,
    )
    checkpoint.save(folder, config, weights(head_dim=head_dim, heads=heads, kv_heads=kv_heads))


def text_without_repeats(length: int, seed: int, *, alphabet: bytes = ALPHABET, after: bytes = b"") -> bytes:
    """Return random text in which no three bytes occur twice, so that its continuation is unambiguous.

    after: such a text with which it begins.
    """
    rng = random.Random(seed)
    text = bytearray(after or rng.choices(alphabet, k=2))
    seen = {bytes(text[i : i + 3]) for i in range(len(text) - 2)}
    while len(text) < length:
        byte = rng.choice(alphabet)
        trigram = bytes((*text[-2:], byte))
        if trigram not in seen:
            seen.add(trigram)
            text.append(byte)
    return bytes(text)


def question(text: bytes, at: int, answer_length: int, *, cue_length: int = 6) -> tuple[list[int], list[int]]:
    """Return a prompt of token ids, `text` and then a cue from its position `at`, and the known answer."""
    cue = text[at : at + cue_length]
    answer = text[at + cue_length : at + cue_length + answer_length]
    return [BOS, *text, ord("\n"), *cue], list(answer)
