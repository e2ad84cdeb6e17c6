# SPDX-License-Identifier: Apache-2.0
"""Which draft tokens see each other when a tree of them is verified."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fi_backend.core.custom_mask import PackedMask
from fi_backend.core.mask_buffer import MaskBuffer

from .step import Step


def is_tree(spec_info: Any) -> bool:
    """Return whether a verification has branches; a chain is causal and needs no mask."""
    return getattr(spec_info, "custom_mask", None) is not None and getattr(spec_info, "topk", None) != 1


class TreeMasks:
    """Packs the masks of SGLang's verifications, for graphs and for steps without one.

    buffer: bool, where SGLang writes masks of [drafts, drafts] a request, one after another. requests,
    drafts, width: greatest number of requests of a step, of draft tokens of one, and its greatest KV length.
    All memory, requests * drafts * width / 8 bytes, is allocated here: a step may find none left.
    """

    def __init__(self, buffer: Tensor, *, requests: int, drafts: int, width: int) -> None:
        self._buffer = buffer
        self._masks = MaskBuffer(
            max_requests=requests, max_q_len=drafts, max_kv_len=width, device=buffer.device
        )

    def pack(self, spec_info: Any, step: Step, *, capture: bool = False) -> PackedMask:
        """Pack the masks of a step over those of the last one.

        capture: a graph is about to be captured, and there are no masks yet.
        """
        mask = None if capture else spec_info.custom_mask.view(-1).view(torch.bool)
        drafts = int(spec_info.draft_token_num)
        trees = mask is not None and (
            mask.numel() == step.num_requests * drafts * drafts or mask.data_ptr() == self._buffer.data_ptr()
        )
        return self._masks.pack(mask, step.qo_indptr, step.kv_lens, tree=trees)
