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
    """Packs the masks of SGLang's verifications.

    buffer: bool, where SGLang writes masks of [drafts, drafts] a request, one after another, or None when
    it never does. drafts: greatest number of draft tokens; width: greatest KV length.
    """

    def __init__(self, buffer: Tensor | None, drafts: int, width: int, device: torch.device) -> None:
        self._buffer = buffer
        self._drafts = drafts
        self._width = width
        self._device = device
        self._eager: MaskBuffer | None = None
        self._graph: MaskBuffer | None = None

    def pack(
        self, spec_info: Any, step: Step, *, graph_requests: int = 0, capture: bool = False
    ) -> PackedMask:
        """Pack the masks of a step.

        graph_requests: of the largest graph, for a step that a graph serves. capture: its graph is about to
        be captured, and there are no masks yet.
        """
        masks = self._masks(step.kv_lens.shape[0], graph_requests)
        mask = None if capture else spec_info.custom_mask.view(-1).view(torch.bool)
        drafts = int(spec_info.draft_token_num)
        trees = mask is not None and (
            mask.numel() == step.num_requests * drafts * drafts
            or (self._buffer is not None and mask.data_ptr() == self._buffer.data_ptr())
        )
        return masks.pack(mask, step.qo_indptr, step.kv_lens, tree=trees)

    def _masks(self, requests: int, graph_requests: int) -> MaskBuffer:
        if graph_requests:
            if self._graph is None or self._graph.max_requests < graph_requests:
                self._graph = self._make(graph_requests)
            return self._graph
        if self._eager is None or self._eager.max_requests < requests:
            self._eager = self._make(1 << (requests - 1).bit_length())
        return self._eager

    def _make(self, requests: int) -> MaskBuffer:
        return MaskBuffer(
            max_requests=requests, max_q_len=self._drafts, max_kv_len=self._width, device=self._device
        )
