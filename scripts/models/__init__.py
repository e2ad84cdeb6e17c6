# SPDX-License-Identifier: Apache-2.0
"""Small models with known answers or known features, made on the spot: nothing is downloaded."""

from fi_backend.benchmarks.models import byte_tokenizer, checkpoint, copy_llama, dummy_llama

__all__ = ["byte_tokenizer", "checkpoint", "copy_llama", "dummy_llama"]
