# SPDX-License-Identifier: Apache-2.0
"""One attention layer: writes the step's keys and values into the cache and runs the planned attention."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from fi_backend.adapters.layer_variants import Chosen, choose, find_asked
from fi_backend.adapters.workspace import reserve
from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import APPENDED, LAYERS, counters
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import resolve
from fi_backend.core.variant import AttentionVariant
from fi_backend.errors import UnsupportedError

from . import compat
from .metadata import FiMetadata, LayerKind, layer_kind
from .translate import (
    asked_variant,
    describe_layer,
    layer_spec,
    refuse_sleep_mode,
    refuse_unknown_options,
    sharing_limits,
    step_limits,
)

_log = logging.getLogger("vllm.plugins.fi_backend")


class _Scales(TypedDict, total=False):
    k_scale: Tensor
    v_scale: Tensor


class FiAttentionImpl(AttentionImpl[FiMetadata]):
    """The implementation object of one vLLM attention layer."""

    supports_dcp: bool = False
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> None:
        """Describe the layer, and allocate and compile what it needs before vLLM profiles memory."""
        if attn_type != AttentionType.DECODER:
            kind = AttentionType(attn_type).value
            raise UnsupportedError(f"attn_type: fi runs decoder attention; got {kind}.")
        refuse_unknown_options(options)
        config = get_current_vllm_config()
        refuse_sleep_mode(config)
        device = resolve(config.device_config.device)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        # What the kernels read, at an address that a captured graph may hold.
        self._sinks = (
            None if sinks is None else sinks.new_empty(num_heads, dtype=torch.float32, device=device)
        )
        self._sinks_seen: tuple[int, int] | None = None
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        )
        self.spec = layer_spec(
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=head_size,
            scale=self.scale,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            block_size=config.cache_config.block_size,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        self._config = config
        self._device = device
        self._asked = asked_variant(config)
        # A plug-in may decide otherwise for a layer, once the layer has its name.
        self._reserve(self.spec, find_asked(self._asked, self.spec, device))
        self._chosen: Chosen | None = None
        self._quantised = self.spec.kv_dtype.startswith("float8")
        self._cache_dtype = getattr(torch, self.spec.kv_dtype)
        self._cache: Tensor | None = None
        self._views: tuple[Tensor, Tensor] | None = None
        self._planned: dict[LayerKind, BatchAttention] | None = None
        self._attention: BatchAttention | None = None
        counters().name_engine(compat.engine())
        counters().add(LAYERS)

    @property
    def variant(self) -> AttentionVariant | None:
        """The variant of attention that the layer runs; None: plain attention."""
        return None if self._chosen is None else self._chosen.variant

    def choose_variant(self, name: str, layer: Any) -> None:
        """Settle, once, which variant the layer runs, and allocate and compile what it needs.

        name, layer: of vLLM, which tells neither to the constructor.
        """
        if self._chosen is not None:
            return
        spec = replace(self.spec, head_dim_v=layer.head_size_v)
        described = describe_layer(name, spec, self._device, self._config, self._asked)
        self._chosen = choose(described, _log)
        self._reserve(spec, self._chosen.variant)

    def _reserve(self, spec: AttentionSpec, variant: AttentionVariant | None) -> None:
        limits = step_limits(self._config)
        reserve(spec, limits, self._device, sharing_limits(self._config, limits), variant)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of a step into the cache.

        key: [tokens, num_kv_heads, head_size]; value: the same with the head size of V; kv_cache: see
        `forward`; slot_mapping: int64 [tokens or fewer], block * block size + offset, -1 to skip.
        """
        if kv_cache.numel() == 0:  # profiling, before the caches exist
            return
        tokens = slot_mapping.shape[0]
        k_cache, v_cache = self._split(kv_cache)
        append_kv(key[:tokens], value[:tokens], k_cache, v_cache, slot_mapping, **self._scales(layer))
        counters().add(APPENDED, tokens)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FiMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend over the cache, which holds this step's keys and values already.

        query: [tokens, num_heads, head_size]; kv_cache: [blocks, num_kv_heads, block size, K and V side by
        side], any strides; output: [tokens, num_heads, head size of V], returned. Without metadata, which
        is how vLLM profiles, the output is zero.
        """
        assert output is not None, "vLLM allocates the output of every attention layer"
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: fused output quantisation is not supported by fi.")
        if attn_metadata is None:
            return output.fill_(0)
        k_cache, v_cache = self._split(kv_cache)
        if self._attention is None or attn_metadata.attention is not self._planned:
            self._planned = attn_metadata.attention
            self._attention = self._planned[layer_kind(layer)]
        # Rows of padding are not sliced off: the plan does not name them.
        self._attention.run(
            query,
            k_cache,
            v_cache,
            out=output,
            alibi_slopes=self.alibi_slopes,
            sinks=self._sinks,
            variant_args=None if self._chosen is None else self._chosen.args,
            **self._scales(layer),
        )
        attn_metadata.count_call()
        return output

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take over what the checkpoint, first or reloaded, holds for this layer.

        By then the whole model is built, and vLLM has not yet measured what memory is left.
        """
        self._sinks_seen = None
        self.refresh_sinks()
        for name, layer in self._config.compilation_config.static_forward_context.items():
            if getattr(layer, "impl", None) is self:
                self.choose_variant(name, layer)

    def refresh_sinks(self) -> None:
        """Convert the sinks to float32 where they have changed; weights may be loaded anew at any time."""
        if self.sinks is None or self._sinks is None:
            return
        version = 0 if self.sinks.is_inference() else self.sinks._version
        seen = (self.sinks.data_ptr(), version)
        if seen != self._sinks_seen:
            self._sinks.copy_(self.sinks)
            self._sinks_seen = seen

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the packed cache as views [blocks, block size, num_kv_heads, head size]."""
        if self._views is None or kv_cache is not self._cache:
            self._cache = kv_cache
            # fp8 caches come as bytes.
            tokens_first = kv_cache.view(self._cache_dtype).transpose(1, 2)
            self._views = tokens_first[..., : self.head_size], tokens_first[..., self.head_size :]
        return self._views

    def _scales(self, layer: Any) -> _Scales:
        if not self._quantised:
            return {}
        # One scale or one for each KV head.
        return {"k_scale": layer._k_scale.view(-1), "v_scale": layer._v_scale.view(-1)}
