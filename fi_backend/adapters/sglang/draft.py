# SPDX-License-Identifier: Apache-2.0
"""The back end of a draft model that decodes several steps in a row."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from .backend import FiAttnBackend
from .refuse import refuse_draft


class FiDraftBackend:
    """One FiAttnBackend for each step of a chain of drafts, as SGLang's draft workers want them.

    factory: SGLang's DraftBackendFactory, whose topk and speculative_num_steps are read.
    """

    def __init__(self, draft_model_runner: Any, factory: Any) -> None:
        refuse_draft(factory.topk)
        self.attn_backends = [
            FiAttnBackend(draft_model_runner, step, factory.speculative_num_steps)
            for step in range(factory.speculative_num_steps - 1)
        ]
        self.needs_cpu_seq_lens = any(each.needs_cpu_seq_lens for each in self.attn_backends)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take over a step of drafts that no graph serves."""
        for each in self.attn_backends:
            each.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of drafts read."""
        for each in self.attn_backends:
            each.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy and plan every step of the drafts that one graph serves."""
        view = build_inner_fb_view(
            forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
        )
        for each in self.attn_backends:
            each.init_forward_metadata_out_graph(view, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Count the forward passes of a capture."""
        for each in self.attn_backends:
            each.init_forward_metadata_in_graph(forward_batch)
