# SPDX-License-Identifier: Apache-2.0
"""The attention layers of an SGLang model: their specs, their kernels and the plans that they share."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fi_backend.adapters.layer_variants import Chosen, choose
from fi_backend.adapters.shared_counts import count_shared
from fi_backend.adapters.step_capture import StepCapture
from fi_backend.adapters.workspace import batch_attention, reserve
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import PLANS, counters
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.prepare import prepare
from fi_backend.core.sharing import SharingLimits, flat_reason
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import resolve, unsupported_reason
from fi_backend.core.variant import AttentionVariant
from fi_backend.errors import UnsupportedError

from .radix import SharedPrefixes
from .refuse import refuse_other_backends
from .step import Kind, Step
from .translate import (
    asked_variant,
    describe_layer,
    layer_spec,
    shares_prefixes,
    sharing_limits,
    step_limits,
)

_log = logging.getLogger("sglang.srt.plugins.fi_backend")


class Layers:
    """Plans steps for the layers of one model runner; layers of one kind share a plan.

    layers: by their names in the model. trees: masks of draft trees will come. shared: what requests share,
    or None where that is not looked for. Raises UnsupportedError for what kernels do not run.
    """

    def __init__(
        self, model_runner: Any, layers: Mapping[str, Any], *, trees: bool, shared: SharedPrefixes | None
    ) -> None:
        pool = model_runner.token_to_kv_pool
        self._mapping = getattr(pool, "layers_mapping", None)
        self._device = resolve(model_runner.device)
        self._limits = step_limits(model_runner)
        self._shared = shared
        # Where sharing is left out, memory stays as it is with it.
        self._sharing = sharing_limits(self._limits) if shares_prefixes(model_runner) else None
        self._page_size: int = model_runner.page_size
        self._common = {
            "dtype": model_runner.dtype,
            "kv_dtype": pool.dtype,
            "page_size": model_runner.page_size,
            "batch_invariant": bool(
                getattr(model_runner.server_args, "enable_deterministic_inference", False)
            ),
        }
        self._attention: dict[Kind, BatchAttention] = {}
        self._captures: dict[Kind, StepCapture] = {}
        self._kinds: dict[tuple[Any, bool, bool], Kind] = {}
        self._of_graphs: dict[Any, set[Kind]] = {}
        self._runner = model_runner
        self._asked = asked_variant(model_runner)
        self._chosen: dict[Any, Chosen] = {}
        self._num_layers: Counter[tuple[AttentionSpec, AttentionVariant | None]] = Counter()
        for name, layer in layers.items():
            spec = layer_spec(layer, **self._common)
            if reason := unsupported_reason(spec, self._device):
                raise UnsupportedError(reason)
            self._num_layers[spec, self._choose(name, layer, spec).variant] += 1
        kinds = [*self._num_layers]
        kinds += [(replace(spec, custom_mask=True), variant) for spec, variant in kinds if trees]
        prepare(*(spec for spec, variant in kinds if variant is None), device=self._device)
        for spec, variant in kinds:
            reserve(spec, self._limits, self._device, self._sharing_of(spec, variant), variant)

    def planned(self, step: Step, layer: Any, *, sinks: bool) -> tuple[BatchAttention, bool]:
        """Return the attention of a layer, planned for the step, and whether its KV lies in the pool of the
        windows.
        """
        key = (layer, sinks, step.mask is not None)
        if (kind := self._kinds.get(key)) is None:
            spec = layer_spec(layer, sinks=sinks, custom_mask=step.mask is not None, **self._common)
            windowed = self._mapping is not None and bool(self._mapping[layer.layer_id][1])
            if layer not in self._chosen:  # it was not in the model when this was made
                self._choose(f"layers.{layer.layer_id}", layer, layer_spec(layer, **self._common))
            kind = self._kinds[key] = Kind(spec, windowed, self._chosen[layer].variant)
        if kind not in step.planned:
            self._plan(step, kind)
        return self._attention[kind], kind.windowed

    def arguments(self, layer: Any) -> dict[str, float | Tensor] | None:
        """Return the arguments of the variant that a layer runs, None for plain attention."""
        return self._chosen[layer].args

    def _choose(self, name: str, layer: Any, spec: AttentionSpec) -> Chosen:
        described = describe_layer(name, layer, spec, self._device, self._runner, self._asked)
        chosen = self._chosen[layer] = choose(described, _log)
        if chosen.variant is not None:
            refuse_other_backends(self._runner, name)
        return chosen

    def plan_graph(self, step: Step) -> None:
        """Plan a step that a graph serves, for every kind of layer that its capture met."""
        for kind in self._of_graphs.get(step.mode, ()):
            self._plan(step, kind)

    def pages(self, cache: Tensor) -> Tensor:
        """View [slots, heads, head size] as [pages, page size, heads, head size]."""
        whole = cache.shape[0] // self._page_size * self._page_size
        return cache[:whole].view(-1, self._page_size, *cache.shape[1:])

    def _plan(self, step: Step, kind: Kind) -> None:
        spec, windowed, variant = kind
        attention = self._attention.get(kind)
        if attention is None:
            attention = self._attention[kind] = batch_attention(
                spec, self._limits, self._device, self._sharing_of(spec, variant), variant
            )
            self._captures[kind] = StepCapture(_log)
        attention.plan(
            step.qo_indptr,
            step.tables[windowed],
            qo_indptr_host=step.qo_indptr_host,
            kv_lens_host=step.kv_lens_host,
            custom_mask=step.mask if spec.custom_mask else None,
            forest=self._forest(step, kind),
        )
        step.planned.add(kind)
        if step.captures:
            self._of_graphs.setdefault(step.mode, set()).add(kind)
        counters().add(PLANS)
        declared = replace(spec, sinks=False, custom_mask=False)
        count_shared(attention, self._num_layers[declared, variant], _log)
        if not step.captures:
            self._captures[kind].offer(attention, step.qo_indptr, step.tables[windowed], step.num_requests)

    def _sharing_of(self, spec: AttentionSpec, variant: AttentionVariant | None) -> SharingLimits | None:
        return None if flat_reason(spec, variant) else self._sharing

    def _forest(self, step: Step, kind: Kind) -> PrefixForest | None:
        """Return what the requests of a step share, if layers of a kind may read it once."""
        spec = kind.spec
        q_lens, kv_lens = step.qo_indptr_host, step.kv_lens_host
        if step.paths is None or self._shared is None or q_lens is None or kv_lens is None:
            return None
        if self._sharing_of(spec, kind.variant) is None:
            return None
        found = self._shared.forest(
            step.paths,
            q_lens,
            kv_lens,
            page_size=self._page_size,
            group=spec.group_size,
            max_tile=self._attention[kind].planner.tiles[1],
        )
        return found if found.num_nodes else None


def scales(layer: Any) -> tuple[float, float]:
    """Return the scales of K and V of an fp8 cache, 1 where SGLang has none."""
    k_scale, v_scale = layer.k_scale_float, layer.v_scale_float
    return 1.0 if k_scale is None else float(k_scale), 1.0 if v_scale is None else float(v_scale)


def output(q: Tensor, width: int, forward_batch: Any) -> Tensor:
    """Return [tokens, width]: what a broken graph of a prefill wants filled, if it fits, or new memory."""
    given: Tensor | None = getattr(forward_batch, "_attn_output", None)
    if (
        given is not None
        and given.dtype is q.dtype
        and given.shape[:1] == q.shape[:1]
        and given.numel() == q.shape[0] * width
        and given.is_contiguous()
    ):
        return given.view(q.shape[0], width)
    return q.new_empty(q.shape[0], width)
