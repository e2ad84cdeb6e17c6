# SPDX-License-Identifier: Apache-2.0
"""The back end object of an SGLang model runner: plans a step, writes its keys and values, attends."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from torch import Tensor

from fi_backend import env
from fi_backend.core.append import append_kv
from fi_backend.core.counters import APPENDED, CALLS, CAPTURED, LAYERS, REPLAYED, STEPS, TOKENS, counters
from fi_backend.core.custom_mask import PackedMask
from fi_backend.errors import PlanError, UnsupportedError

from . import compat
from .layers import Layers, output, scales
from .radix import SharedPrefixes
from .refuse import ADVICE, refuse_cache, refuse_engine, refuse_layer, refuse_options
from .step import GraphBuffers, Step, StepArrays
from .translate import draft_tokens, shares_prefixes, step_lengths, verifies_trees
from .tree_mask import TreeMasks, is_tree


class FiAttnBackend(AttentionBackend):
    """Decoder attention over SGLang's KV pools; `--attention-backend fi`.

    draft_step: which step of a chain of drafts it serves, from 0; None for everything else. draft_steps: as
    many are given slots at once. Everything that cannot run is refused when the object is made, before a
    request comes.
    """

    # Dummy steps, too, must stay within the rows of the token table (read by 0.5.23).
    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, model_runner: Any, draft_step: int | None = None, draft_steps: int = 1) -> None:
        super().__init__()
        refuse_engine(model_runner)
        if compat.plans_on_another_stream():
            raise UnsupportedError(
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM: not supported by fi, which plans a step on the stream "
                f"that runs it. Leave it unset. {ADVICE}"
            )
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        refuse_cache(self.token_to_kv_pool, MHATokenToKVPool, SWAKVPool)
        hybrid = isinstance(self.token_to_kv_pool, SWAKVPool)
        table = self.req_to_token_pool.req_to_token
        self.max_context_len = table.shape[1]
        self._draft_step, self._draft_steps = draft_step, draft_steps
        self._arrays = StepArrays(
            table,
            model_runner.page_size,
            self.token_to_kv_pool.translate_loc_from_full_to_swa if hybrid else None,
        )
        layers = {
            name: module
            for name, module in model_runner.model.named_modules()
            if isinstance(module, RadixAttention)
        }
        for layer in layers.values():
            refuse_layer(layer)
        drafts = 0 if model_runner.is_draft_worker else draft_tokens(model_runner)
        self._verify_mask = _verify_mask(drafts, table)
        self._masks: TreeMasks | None = None
        if self._verify_mask is not None and verifies_trees(model_runner):
            self._masks = TreeMasks(
                self._verify_mask.buffer, requests=table.shape[0], drafts=drafts, width=self.max_context_len
            )
        shares = shares_prefixes(model_runner) and env.SHARING not in env.without()
        self._shared = SharedPrefixes() if shares else None
        self._layers = Layers(model_runner, layers, trees=self._masks is not None, shared=self._shared)
        # Speculation knows exact lengths on the device alone; asking for the host's would wait for it.
        self.needs_cpu_seq_lens = not (table.is_cuda and draft_tokens(model_runner))
        self._step: Step | None = None
        self._graphs: GraphBuffers | None = None
        self._num_layers = len(layers)
        counters().name_engine(compat.engine())
        if draft_step is None:
            counters().add(LAYERS, len(layers))

    def expect(self, batch: Any, forward_batch: Any) -> None:
        """Look up what the requests of a batch share; its step comes next."""
        if self._shared is not None:
            self._shared.expect(batch, forward_batch)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take over a step that no graph serves; the first layer of each kind plans it, since sinks are told
        to a call alone.
        """
        self._step = None
        if forward_batch.forward_mode.is_idle():
            return
        step = self._arrays.step(forward_batch, step_lengths(forward_batch, self._draft_step))
        step.mask = self._mask(step, forward_batch.spec_info)
        if self._shared is not None:
            step.paths = self._shared.take(forward_batch, step.num_requests)
        self._step = step
        counters().add(STEPS)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of up to max_bs requests and max_num_tokens query tokens read."""
        held = self._graphs
        if held is not None and held.requests >= max_bs and held.tokens >= max_num_tokens:
            return
        if held is not None and held.captured:
            raise PlanError(
                f"init_cuda_graph_state: expected at most {held.requests} requests and {held.tokens} tokens, "
                f"for which graphs are captured; got {max_bs} and {max_num_tokens}."
            )
        self._graphs = self._arrays.buffers(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the KV length of padding rows: they read slot 0, which holds nothing."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Copy a step's index arrays to where its graph reads them and, for a replay, plan it.

        For a capture, the first calls, which are not captured yet, tell which kinds of layers to plan.
        """
        graphs = self._graphs
        if graphs is None:
            raise PlanError("init_forward_metadata_out_graph: expected init_cuda_graph_state() before it.")
        mode = forward_batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            raise UnsupportedError(f"graphs of whole steps of the mode {mode.name}: not supported by fi.")
        step = self._arrays.step(forward_batch, step_lengths(forward_batch, self._draft_step), graphs)
        step.mask = self._mask(step, forward_batch.spec_info, capture=in_capture)
        if (slots := forward_batch.out_cache_loc) is not None:
            if self._draft_step is not None:  # those of all steps, request by request
                slots = slots.view(-1, self._draft_steps)[:, self._draft_step]
            step.window_slots = self._arrays.fill_window_slots(graphs, slots)
        self._step = step
        if self._shared is not None:
            step.paths = self._shared.take(forward_batch, step.num_requests)
        if in_capture:
            graphs.captured = step.captures = True
            return
        self._layers.plan_graph(step)
        counters().add(STEPS)
        counters().add(REPLAYED, self._num_layers)
        counters().add(TOKENS, self._num_layers * step.num_tokens)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Count a forward pass of a capture: graphs themselves plan nothing."""
        counters().add(STEPS)

    def shared_read_ends(self, fm: Any) -> Any:
        """Tell 0.5.23 that a graph reads nothing of the scheduler's: its step was copied before."""
        if fm.is_decode() or fm.is_target_verify() or fm.is_draft_extend_v2():
            return compat.reads_end_before_replay()
        return super().shared_read_ends(fm)

    @property
    def verify_mask(self) -> Any:
        """Where SGLang writes the trees that it lets this back end verify."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Pack the trees anew: the step was planned beside the drafts, before their masks were known."""
        step = self._step
        if step is not None and step.mask is not None and self._masks is not None:
            self._masks.pack(spec_info, step)

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
        attention, windowed = self._layers.planned(step, layer, sinks=sinks is not None)
        spec = attention.spec
        # fp8 caches carry one scale for K and one for V; other caches hold plain values.
        k_scale, v_scale = scales(layer) if spec.kv_dtype.startswith("float8") else (1.0, 1.0)
        k_cache, v_cache = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            slots = self._slots(step, windowed, forward_batch.out_cache_loc)
            keys = k.view(-1, spec.num_kv_heads, spec.head_dim)
            values = v.view(-1, spec.num_kv_heads, spec.head_dim_v)
            append_kv(keys, values, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)
        out = output(q, spec.num_qo_heads * spec.head_dim_v, forward_batch)
        attention.run(
            q.reshape(-1, spec.num_qo_heads, spec.head_dim),
            self._layers.pages(k_cache),
            self._layers.pages(v_cache),
            out=out.view(-1, spec.num_qo_heads, spec.head_dim_v),
            sinks=None if sinks is None else sinks.to(torch.float32),
            k_scale=k_scale,
            v_scale=v_scale,
            variant_args=self._layers.arguments(layer),
        )
        self._count(step, 0 if k is None or not save_kv_cache else step.num_tokens)
        return out

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """Return whether SGLang may run its index kernels in Triton, which are not for the CPU."""
        return bool(self.req_to_token_pool.req_to_token.is_cuda)

    def _mask(self, step: Step, spec_info: Any, *, capture: bool = False) -> PackedMask | None:
        if self._masks is None or not step.mode.is_target_verify() or not is_tree(spec_info):
            return None
        return self._masks.pack(spec_info, step, capture=capture)

    def _slots(self, step: Step, windowed: bool, slots: Tensor) -> Tensor:
        if not windowed:
            return slots
        if step.window_slots is None:
            step.window_slots = self._arrays.window_slots(slots)
        return step.window_slots[: slots.shape[0]]

    def _count(self, step: Step, appended: int) -> None:
        if self.support_triton() and torch.cuda.is_current_stream_capturing():
            counters().add(CAPTURED)
            return
        counters().add(CALLS)
        counters().add(TOKENS, step.num_tokens)
        counters().add(APPENDED, appended)


def _verify_mask(drafts: int, table: Tensor) -> VerifyMask | None:
    if not drafts:
        return None
    requests = table.shape[0]
    buffer = torch.ones(requests * drafts * drafts, dtype=torch.bool, device=table.device)
    return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)
