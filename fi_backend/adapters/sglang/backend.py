# SPDX-License-Identifier: Apache-2.0
"""The back end object of an SGLang model runner: plans a step, writes its keys and values, attends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import APPENDED, CALLS, LAYERS, PLANS, STEPS, TOKENS, counters
from fi_backend.core.page_table import PageTable
from fi_backend.core.prepare import prepare
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import unsupported_reason
from fi_backend.errors import PlanError, UnsupportedError

from . import compat
from .translate import (
    indptr,
    layer_spec,
    query_lengths,
    refuse_cache,
    refuse_engine,
    refuse_layer,
    refuse_options,
    step_limits,
)

# What one plan serves: layers of one spec whose KV lies in one pool (True: that of the sliding windows).
_Kind = tuple[AttentionSpec, bool]


@dataclass
class _Step:
    """One step: its index arrays, and which kinds of layers are planned for it."""

    qo_indptr: Tensor
    kv_lens_host: Tensor
    tables: dict[bool, PageTable]
    slots: dict[bool, Tensor]
    num_tokens: int
    planned: set[_Kind] = field(default_factory=set)


class FiAttnBackend(AttentionBackend):
    """Decoder attention over SGLang's KV pools; `--attention-backend fi`.

    Everything that cannot run is refused when the object is made, before a request comes.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        refuse_engine(model_runner)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        refuse_cache(self.token_to_kv_pool, MHATokenToKVPool, SWAKVPool)
        self._hybrid = isinstance(self.token_to_kv_pool, SWAKVPool)
        self._device = torch.device(model_runner.device)
        self._dtype: torch.dtype = model_runner.dtype
        self._page_size: int = model_runner.page_size
        self._limits = step_limits(model_runner)
        self._attention: dict[_Kind, BatchAttention] = {}
        self._kinds: dict[tuple[Any, bool], _Kind] = {}
        self._step: _Step | None = None
        layers = [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]
        for layer in layers:
            refuse_layer(layer)
        specs = {self._spec(layer, sinks=False) for layer in layers}
        for spec in specs:
            if reason := unsupported_reason(spec, self._device):
                raise UnsupportedError(reason)
        prepare(*specs, device=self._device)
        counters().name_engine(compat.engine())
        counters().add(LAYERS, len(layers))

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take over a step; the first layer of each kind plans it, since sinks are told to a call alone."""
        self._step = None
        if forward_batch.forward_mode.is_idle():
            return
        lengths = query_lengths(forward_batch)
        qo_indptr = indptr(lengths)
        kv_lens = forward_batch.seq_lens.to(torch.int32)
        known = forward_batch.seq_lens_cpu
        kv_lens_host = kv_lens if known is None else known.to(torch.int32)
        rows, table = forward_batch.req_pool_indices, self.req_to_token_pool.req_to_token
        size, slots = self._page_size, forward_batch.out_cache_loc
        step = _Step(
            qo_indptr,
            kv_lens_host,
            {False: PageTable.from_token_table(table, rows, kv_lens, page_size=size)},
            {False: slots},
            sum(lengths),
        )
        if self._hybrid:
            # The pool of the sliding windows numbers its slots anew, so these rows alone are copied.
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            own = translate(table[rows, : int(kv_lens_host.max())]).to(torch.int32)
            own_rows = torch.arange(len(lengths), device=own.device)
            step.tables[True] = PageTable.from_token_table(own, own_rows, kv_lens, page_size=size)
            step.slots[True] = translate(slots).to(torch.int64)
        self._step = step
        counters().add(STEPS)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Write the step's keys and values of one layer, then attend.

        q: [tokens, tp_q_head_num * qk_head_dim]; k, v: [tokens, tp_k_head_num, head size], or None where
        an earlier layer wrote them; sinks: [tp_q_head_num]. Returns [tokens, tp_q_head_num * v_head_dim].
        """
        refuse_options(options)
        step = self._step
        if step is None:
            raise PlanError(
                "forward: expected init_forward_metadata() to have planned this step; got no plan."
            )
        kind = self._kind(layer, sinks is not None)
        if kind not in step.planned:
            self._plan(step, kind)
        spec, windowed = kind
        # fp8 caches carry one scale for K and one for V; other caches hold plain values.
        k_scale, v_scale = _scales(layer) if spec.kv_dtype.startswith("float8") else (1.0, 1.0)
        k_cache, v_cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            slots = step.slots[windowed]
            keys = k.view(-1, spec.num_kv_heads, spec.head_dim)
            values = v.view(-1, spec.num_kv_heads, spec.head_dim_v)
            append_kv(keys, values, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
            counters().add(APPENDED, slots.shape[0])
        out = q.new_empty(q.shape[0], spec.num_qo_heads * spec.head_dim_v)
        self._attention[kind].run(
            q.reshape(-1, spec.num_qo_heads, spec.head_dim),
            self._pages(k_cache),
            self._pages(v_cache),
            out=out.view(-1, spec.num_qo_heads, spec.head_dim_v),
            sinks=None if sinks is None else sinks.to(torch.float32),
            k_scale=k_scale,
            v_scale=v_scale,
        )
        counters().add(CALLS)
        counters().add(TOKENS, step.num_tokens)
        return out

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Return False: SGLang's index kernels in Triton are not for the CPU."""
        return False

    def _kind(self, layer: Any, sinks: bool) -> _Kind:
        """Return what plan serves a layer."""
        known = self._kinds.get((layer, sinks))
        if known is None:
            windowed = self._hybrid and bool(self.token_to_kv_pool.layers_mapping[layer.layer_id][1])
            known = self._kinds[layer, sinks] = (self._spec(layer, sinks=sinks), windowed)
        return known

    def _spec(self, layer: Any, *, sinks: bool) -> AttentionSpec:
        return layer_spec(
            layer,
            dtype=self._dtype,
            kv_dtype=self.token_to_kv_pool.dtype,
            page_size=self._page_size,
            sinks=sinks,
        )

    def _plan(self, step: _Step, kind: _Kind) -> None:
        attention = self._attention.get(kind)
        if attention is None:
            attention = self._attention[kind] = BatchAttention(
                kind[0],
                max_requests=self._limits.max_requests,
                max_tokens=self._limits.max_tokens,
                max_kv_len=self._limits.max_kv_len,
                device=self._device,
            )
        attention.plan(
            step.qo_indptr,
            step.tables[kind[1]],
            qo_indptr_host=step.qo_indptr,
            kv_lens_host=step.kv_lens_host,
        )
        step.planned.add(kind)
        counters().add(PLANS)

    def _pages(self, cache: Tensor) -> Tensor:
        """View [slots, heads, head size] as [pages, page size, heads, head size]."""
        whole = cache.shape[0] // self._page_size * self._page_size
        return cache[:whole].view(-1, self._page_size, *cache.shape[1:])


def _scales(layer: Any) -> tuple[float, float]:
    k_scale, v_scale = layer.k_scale_float, layer.v_scale_float
    return 1.0 if k_scale is None else float(k_scale), 1.0 if v_scale is None else float(v_scale)
