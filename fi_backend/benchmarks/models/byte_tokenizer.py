# SPDX-License-Identifier: Apache-2.0
"""A byte tokenizer: token id = byte value, then <bos> 256, <eos> 257, <pad> 258."""

from __future__ import annotations

import json
from pathlib import Path

BOS, EOS, PAD = 256, 257, 258
SPECIAL = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
VOCAB_SIZE = 320


def write(folder: Path, *, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json, which load as a Hugging Face fast tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _characters() -> dict[str, int]:
    """Map the printable stand-in that byte-level BPE uses for each byte to the byte's value.

    Printable bytes of Latin-1 stand for themselves, the others for the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: 256 + index for index, byte in enumerate(others)}
    return {chr(stand_in.get(byte, byte)): byte for byte in range(256)}
