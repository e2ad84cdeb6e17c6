# SPDX-License-Identifier: Apache-2.0
"""Plans a step: vLLM's common metadata in, one plan for each kind of layer out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import PLANS, STEPS, counters
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError

from . import compat
from .translate import draft_tokens, step_limits
from .workspace import batch_attention

LayerKind = tuple[AttentionSpec, int]


def layer_kind(layer: Any) -> LayerKind:
    """Return what tells layers of one KV cache group apart: the spec of its impl, and the head size of V.

    vLLM tells the size of V to the layer alone, not to its impl.
    """
    return layer.impl.spec, layer.head_size_v


@dataclass
class FiMetadata:
    """What the layers of one KV cache group need in one step.

    num_actual_tokens: query tokens; rows past them are padding.
    attention: the planned attention of each layer, by `layer_kind`; layers of one kind share one.
    """

    num_actual_tokens: int
    attention: dict[LayerKind, BatchAttention]


class FiMetadataBuilder(AttentionMetadataBuilder[FiMetadata]):
    """Owns the plans of one KV cache group and makes them anew for every step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
        self._limits = step_limits(vllm_config, attention_chunk_size=chunk)
        self._drafts = draft_tokens(vllm_config)
        self.block_size: int = kv_cache_spec.block_size
        # A step is planned once for each KV cache group and counted once.
        self._counts_steps = int(next(filter(_runs_here, layers.items()))[0] in layer_names)
        self.attention: dict[LayerKind, BatchAttention] = {}
        for name in layer_names:
            # Windows, caps, head counts and sizes of V may differ among the layers that share a cache.
            kind = layer_kind(layers[name])
            if kind not in self.attention:
                declared, head_dim_v = kind
                spec = replace(declared, page_size=self.block_size, head_dim_v=head_dim_v)
                self.attention[kind] = batch_attention(spec, self._limits, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FiMetadata:
        """Plan a step."""
        return self._plan(common_attn_metadata, drafts=0)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FiMetadata:
        """Plan a step of a draft model."""
        return self._plan(common_attn_metadata, drafts=self._drafts)

    def _plan(self, common: CommonAttentionMetadata, *, drafts: int) -> FiMetadata:
        if common.causal is not True:
            raise UnsupportedError("causal: fi runs causal decoder attention alone in this version.")
        requests = common.num_reqs
        qo_indptr_host = common.query_start_loc_cpu[: requests + 1]
        table = PageTable.from_block_table(
            common.block_table_tensor[:requests], common.seq_lens[:requests], page_size=self.block_size
        )
        kv_lens_host = compat.kv_len_bounds(common, drafts=drafts, limit=self._limits.max_kv_len)
        for attention in self.attention.values():
            attention.plan(
                common.query_start_loc[: requests + 1],
                table,
                qo_indptr_host=qo_indptr_host,
                kv_lens_host=kv_lens_host,
            )
        count = counters()
        count.add(STEPS, self._counts_steps)
        count.add(PLANS, len(self.attention))
        return FiMetadata(int(qo_indptr_host[-1]), self.attention)


def _runs_here(layer: tuple[str, Any]) -> bool:
    return isinstance(getattr(getattr(layer[1], "impl", None), "spec", None), AttentionSpec)
