# SPDX-License-Identifier: Apache-2.0
"""Plans a step: vLLM's common metadata in, one plan for each kind of layer out."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

from fi_backend import env
from fi_backend.adapters.host_plan import HostLengths, copy_forest, copy_lengths, may_wait
from fi_backend.adapters.shared_counts import count_shared
from fi_backend.adapters.step_capture import StepCapture
from fi_backend.adapters.workspace import batch_attention
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import CALLS, CAPTURED, PLANS, REPLAYED, STEPS, TOKENS, counters
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant
from fi_backend.errors import UnsupportedError

from . import compat
from .translate import draft_tokens, refuse_micro_batches, sharing_limits, step_limits

_log = logging.getLogger("vllm.plugins.fi_backend")


class LayerKind(NamedTuple):
    """What tells layers of one KV cache group apart.

    spec: of its impl; head_dim_v: the head size of V, which vLLM tells to the layer and not to its impl.
    """

    spec: AttentionSpec
    head_dim_v: int
    variant: AttentionVariant | None


def layer_kind(layer: Any) -> LayerKind:
    """Return the kind of a layer; layers of one kind share a plan."""
    return LayerKind(layer.impl.spec, layer.head_size_v, layer.impl.variant)


@dataclass
class FiMetadata:
    """What the layers of one KV cache group need in one step.

    num_actual_tokens: query tokens; rows past them are padding.
    attention: the planned attention of each layer, by `layer_kind`; layers of one kind share one. The same
        object in every step of a builder.
    capture: the step is made for the capture of a CUDA graph.
    replays: layers counted as replayed, because graphs exist that may serve the step.
    """

    num_actual_tokens: int
    attention: dict[LayerKind, BatchAttention]
    capture: bool = False
    replays: int = 0

    def count_call(self) -> None:
        """Count the attention call of one layer, which Python made."""
        count = counters()
        if self.capture and torch.cuda.is_current_stream_capturing():
            count.add(CAPTURED)
            return
        if self.replays:  # no graph served the step: its layers call one by one
            count.add(REPLAYED, -self.replays)
            count.add(TOKENS, -self.replays * self.num_actual_tokens)
            self.replays = 0
        count.add(CALLS)
        count.add(TOKENS, self.num_actual_tokens)


class FiMetadataBuilder(AttentionMetadataBuilder[FiMetadata]):
    """Owns the plans of one KV cache group and makes them anew for every step.

    A captured CUDA graph holds the addresses of vLLM's tensors, which both model runners keep in place, and
    of the plan and the scratch memory, which live as long as the builder.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device, **_: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_micro_batches(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        chunk = getattr(kv_cache_spec, "attention_chunk_size", None)
        self._limits = step_limits(vllm_config, attention_chunk_size=chunk)
        self._drafts = draft_tokens(vllm_config)
        self._graphs = False
        self.block_size: int = kv_cache_spec.block_size
        # A step is planned once for each KV cache group and counted once.
        self._counts_steps = int(next(filter(_runs_here, layers.items()))[0] in layer_names)
        self._num_layers = len(layer_names)
        for name in layer_names:
            layers[name].impl.choose_variant(name, layers[name])
        self._with_sinks = [layers[name].impl for name in layer_names if layers[name].impl.spec.sinks]
        self._layers = Counter(layer_kind(layers[name]) for name in layer_names)
        self._on_host = device.type == "cpu"
        without = env.without()
        self._shares = env.SHARING not in without
        self._device_plans = env.DEVICE_PLAN not in without
        sharing = sharing_limits(vllm_config, self._limits)
        self.attention: dict[LayerKind, BatchAttention] = {}
        for kind in self._layers:
            # Windows, caps, head counts and sizes of V may differ among the layers that share a cache.
            spec = replace(kind.spec, page_size=self.block_size, head_dim_v=kind.head_dim_v)
            self.attention[kind] = batch_attention(spec, self._limits, device, sharing, kind.variant)
        self._captures = {kind: StepCapture(_log) for kind in self._layers}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return ALWAYS on a GPU: one captured launch serves decoding, mixed and prefilling steps."""
        cuda = vllm_config.device_config.device_type == "cuda"
        return AttentionCGSupport.ALWAYS if cuda else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FiMetadata:
        """Plan a step."""
        return self._plan(common_attn_metadata)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> FiMetadata:
        """Plan a step of a draft model."""
        return self._plan(common_attn_metadata, drafts=self._drafts)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FiMetadata:
        """Plan the dummy step that a CUDA graph is captured with; any step of its size may replay it."""
        self._graphs = True
        return self._plan(common_attn_metadata, capture=True)

    def _plan(self, common: CommonAttentionMetadata, *, drafts: int = 0, capture: bool = False) -> FiMetadata:
        if common.causal is not True:
            raise UnsupportedError("causal: fi runs causal decoder attention alone in this version.")
        for impl in self._with_sinks:
            impl.refresh_sinks()
        requests = common.num_reqs
        qo_indptr_host = common.query_start_loc_cpu[: requests + 1]
        table = PageTable.from_block_table(
            common.block_table_tensor[:requests], common.seq_lens[:requests], page_size=self.block_size
        )
        kv_lens_host = compat.kv_len_bounds(common, drafts=drafts, limit=self._limits.max_kv_len)
        # A draft model may lengthen and shorten requests between its plan and its runs, and a dummy step may
        # be longer than any request: these are planned flat.
        may_share = (
            not (capture or drafts or kv_lens_host is None)
            and requests > 1
            and common.max_seq_len <= self._limits.max_kv_len
        )
        qo_indptr = common.query_start_loc[: requests + 1]
        known = None if kv_lens_host is None else HostLengths(qo_indptr_host, kv_lens_host)
        copied: HostLengths | None = None
        for kind, attention in self.attention.items():
            searched = may_share and attention.tally is not None
            shares = searched and self._shares
            # What is shared is looked for where the block table lies, and with the exact lengths; without
            # sharing the plan is made in the same place, and without either the host's own lengths will do.
            wants_exact = searched and (self._shares or self._device_plans)
            lengths = known if self._on_host or not wants_exact else None
            forest = None
            if lengths is None and not self._device_plans and may_wait(qo_indptr):
                lengths = copied = copied or copy_lengths(qo_indptr, table.kv_lens)
                forest = copy_forest(attention, table, copied) if shares else None
            attention.plan(
                qo_indptr,
                table,
                qo_indptr_host=None if lengths is None else lengths.qo_indptr,
                kv_lens_host=None if lengths is None else lengths.kv_lens,
                forest=forest,
                detect_prefixes=shares and forest is None,
            )
            count_shared(attention, self._layers[kind], _log)
            if not capture:
                self._captures[kind].offer(attention, qo_indptr, table, requests)
        count = counters()
        count.add(STEPS, self._counts_steps)
        count.add(PLANS, len(self.attention))
        metadata = FiMetadata(int(qo_indptr_host[-1]), self.attention, capture)
        if self._graphs and not capture:
            # Python does not run inside a replayed graph. A layer that does call takes this back.
            metadata.replays = self._num_layers
            count.add(REPLAYED, metadata.replays)
            count.add(TOKENS, metadata.replays * metadata.num_actual_tokens)
        return metadata


def _runs_here(layer: tuple[str, Any]) -> bool:
    return isinstance(getattr(getattr(layer[1], "impl", None), "spec", None), AttentionSpec)
