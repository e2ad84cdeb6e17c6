# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch of requests: plan once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fi_backend import env
from fi_backend.core import attention_call, kernels, ops, support
from fi_backend.core.attention_checks import (
    expect_caches,
    expect_table,
    expect_tensor,
    take_workspace,
)
from fi_backend.core.block_sparse import BlockSparse
from fi_backend.core.custom_mask import PackedMask, pack_for
from fi_backend.core.layout_checks import expect_given
from fi_backend.core.page_table import PageTable
from fi_backend.core.plan import Plan
from fi_backend.core.plan_buffer import PlanBuffer
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.share_tally import ShareTally
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step_forest import expect_one_source, found, shares
from fi_backend.core.variant import AttentionVariant
from fi_backend.core.variant_args import VariantArguments
from fi_backend.core.variant_names import find_variant
from fi_backend.errors import PlanError, UnsupportedError

_Scale = float | Tensor


class BatchAttention:
    """Attention over paged or contiguous KV for up to `max_requests` requests a step.

    spec: what is fixed for the layer. max_requests, max_tokens: of one step (query tokens of all requests
    together). max_kv_len: KV tokens of one request. device: where q and the caches live. num_ctas:
    workers to balance over (default: torch's intra-op threads, or one a multiprocessor). planned_queues:
    run the queues of the paper's Algorithm 1 instead of drawing items by ticket. longest_first: False leaves
    the work items in the order of the requests, which changes no result. workspace: uint8, at
    least workspace_size() bytes, contents arbitrary; layers that run one after another may share it
    (default: an own one). costs: the planner's cost model (default: that of the device). sharing: capacity
    for prefixes that several requests share (default: none). variant: functors of the user, or the name of a
    registered variant; the first use compiles it. kernel: a name of fi_backend.core.kernel_choice's instead
    of the best that can run the layer; ValueError where there is none, or it cannot.

    tally: what shared prefixes have saved, or None without sharing. All memory is allocated here, but the
    output when none is given. Raises UnsupportedError when the spec cannot run on the device.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_requests: int,
        max_tokens: int,
        max_kv_len: int,
        device: str | torch.device = "cpu",
        num_ctas: int | None = None,
        planned_queues: bool = False,
        longest_first: bool = True,
        workspace: Tensor | None = None,
        costs: CostModel | None = None,
        sharing: SharingLimits | None = None,
        variant: AttentionVariant | str | None = None,
        kernel: str | None = None,
    ) -> None:
        self.variant = find_variant(variant)
        if reason := support.unsupported_reason(spec, device, self.variant):
            raise UnsupportedError(reason)
        if max_kv_len > support.MAX_KV_LEN:
            raise ValueError(f"max_kv_len: expected at most {support.MAX_KV_LEN}; got {max_kv_len}.")
        self.spec = spec
        self.device = support.resolve(device)
        self.num_ctas = support.default_workers(self.device) if num_ctas is None else num_ctas
        self.planner = Planner(
            spec,
            Limits(max_requests, max_tokens, max_kv_len),
            num_ctas=self.num_ctas,
            costs=support.cost_model(spec, self.device, costs),
            planned_queues=planned_queues,
            longest_first=longest_first,
            tiles=support.query_tiles(spec, self.device, self.variant, kernel=kernel),
            sharing=sharing,
            variant=self.variant,
        )
        self._kernel = kernels.attention_key(spec, self.device, self.variant, kernel)
        self._variant = VariantArguments(self.variant, self.device) if self.variant else None
        self._capacity = torch.tensor(self.planner.capacity, dtype=torch.int64, device="cpu")
        self._plan_buffer = PlanBuffer(self.planner.layout.total, self.device)
        self._workspace = take_workspace(workspace, self.workspace_size(), self.device)
        # Made now, so that no capture has to compile or allocate anything.
        if self.device.type == "cuda":
            self.planner.prepare(self.device)
        ops.scale_tensor("k_scale", 1.0, self.device)
        self.tally = ShareTally(self.device) if self.planner.sharing else None
        self._qo_indptr: Tensor | None = None
        self._table: PageTable | None = None
        self._mask: PackedMask | None = None
        self._mask_moves = False

    def workspace_size(self) -> int:
        """Bytes of scratch memory that run() needs: the partial states of the largest possible plan."""
        return self.planner.scratch_bytes

    def plan(
        self,
        qo_indptr: Tensor,
        page_table: PageTable | BlockSparse,
        *,
        qo_indptr_host: Tensor | None = None,
        kv_lens_host: Tensor | None = None,
        custom_mask: Tensor | Sequence[Tensor] | PackedMask | None = None,
        forest: PrefixForest | None = None,
        detect_prefixes: bool = False,
        shareable: Tensor | None = None,
    ) -> Plan | None:
        """Balance one step; every layer of the step then calls run().

        qo_indptr: int32 [requests + 1], first query token of each request. page_table: where the KV of the
        same requests lies. qo_indptr_host, kv_lens_host: host int32 copies; kv_lens_host may be an upper
        bound, since run() reads the exact lengths. Without them the tensors themselves are read: on CUDA
        by the device planner, on the current stream, which may be capturing a graph.
        custom_mask: bool, see custom_mask.pack_mask, with exact host lengths; or what a MaskBuffer packed,
            which a captured graph may read. Needs a spec with custom_mask=True.
        forest: which requests share leading pages, found for a host plan of exactly these lengths and pages;
            where it pays, these are read once for all of them. They may not change until run(), nor may the
            query starts; a KV length may shrink as long as the shared pages stay before its queries. Needs
            `sharing`. Specs with a flat_reason() (windows, ALiBi, custom masks, batch-invariant) plan flat.
        detect_prefixes: find the forest in the page table, where that and the lengths lie: on the host, or on
            the device without host lengths. The host's lengths then have to be exact. shareable: int32
            [requests] beside the page table, at most so many KV tokens of a request are shared, such as those
            written before this step (default: all whole pages before its queries).

        Waits for the device only to copy a custom mask, and while four plans are still being uploaded. On
        CUDA, run() reads qo_indptr, the page table and the plan from where they lie now: a captured graph
        serves later steps if those tensors are filled anew in place.

        Returns a view of the plan, valid until the next call; None when the device made it. Raises
        PlanError (a ValueError) naming the argument when an input breaks a limit; the previous plan then
        stays.
        """
        if isinstance(page_table, BlockSparse):
            if self.spec.causal or self.spec.window_left >= 0:
                raise PlanError(
                    "page_table: BlockSparse rows carry no token positions; expected a spec with "
                    "causal=False and window_left=-1. BlockSparseAttention takes causal masks of blocks."
                )
            page_table = page_table.to_page_table()
        expect_table(self.spec, self.device, qo_indptr, page_table)
        expect_one_source(forest, detect_prefixes, shareable)
        on_device = self.device.type == "cuda" and qo_indptr_host is None and kv_lens_host is None
        if on_device:
            if forest is not None:
                raise PlanError(
                    "forest: expected qo_indptr_host and kv_lens_host with it; got lengths on the device."
                )
            mask = pack_for(self.spec, custom_mask, None, None, self.device)
            searched = page_table if detect_prefixes and self._shares("detect_prefixes") else None
            self._plan_on_device(qo_indptr, page_table.kv_lens, searched, shareable)
            plan = None
        else:
            q_host = qo_indptr if qo_indptr_host is None else qo_indptr_host
            kv_host = page_table.kv_lens if kv_lens_host is None else kv_lens_host
            for name, tensor in (("qo_indptr_host", q_host), ("kv_lens_host", kv_host)):
                expect_tensor(name, tensor)
                if tensor.device.type != "cpu":
                    raise PlanError(f"{name}: expected a host tensor, given with the other one; got none.")
            mask = pack_for(self.spec, custom_mask, q_host, kv_host, self.device)
            if detect_prefixes and self._shares("detect_prefixes"):
                forest = found(self.spec, self.planner.tiles[1], page_table, (q_host, kv_host), shareable)
            elif forest is not None and not self._shares("forest"):
                forest = None
            plan = self._plan_on_host(q_host, kv_host, forest)
        self._qo_indptr, self._table, self._mask = qo_indptr, page_table, mask
        self._mask_moves = mask is not None and mask is not custom_mask
        return plan

    def _shares(self, name: str) -> bool:
        return shares(self.spec, self.variant, self.planner.sharing, name)

    def _plan_on_device(
        self, qo_indptr: Tensor, kv_lens: Tensor, searched: PageTable | None, shareable: Tensor | None
    ) -> None:
        buffer, limits = self._plan_buffer.tensor, shareable if searched else None
        tally = self.tally.tensor if self.tally else None
        try:
            self.planner.plan_on_device(qo_indptr, kv_lens, buffer, searched, limits, tally)
        except ValueError as error:
            raise PlanError(str(error)) from None

    def _plan_on_host(self, qo_indptr: Tensor, kv_lens: Tensor, forest: PrefixForest | None) -> Plan:
        host = self._plan_buffer.host()
        try:
            self.planner.plan(qo_indptr, kv_lens, host, forest)
        except ValueError as error:
            raise PlanError(str(error)) from None
        self._plan_buffer.upload()
        view = host.numpy()
        view.flags.writeable = False
        plan = Plan(view, self.planner.layout)
        if self.tally and forest is not None:
            self.tally.add(plan)
        return plan

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        variant_args: Mapping[str, float | Tensor] | None = None,
    ) -> Tensor:
        """Compute attention of the planned step.

        q: [tokens, num_qo_heads, head_dim] of spec.dtype, last dimension contiguous; rows past the planned
            tokens are ignored. k_cache: [pages, page_size, num_kv_heads, head_dim], v_cache the same with
            head_dim_v, of spec.kv_dtype (fp8 also as uint8), any strides with a contiguous last dimension;
            contiguous KV: [total, num_kv_heads, head_dim].
        out: [tokens, num_qo_heads, head_dim_v] of spec.dtype (default: allocated). lse: float32
            [tokens, num_qo_heads], natural log, written when given. Rows that see no key get o = 0,
            lse = -inf.
        k_scale, v_scale: dequantisation of K and V: a float, or float32 [1] or [num_kv_heads].
        alibi_slopes, sinks: float32 [num_qo_heads]; needed exactly when the spec says so.
        variant_args: parameters of the variant by name; those that have no default are needed. Tensors lie
            where q does; a captured graph reads them, and the numbers of now, when it is replayed.

        Returns out. Raises PlanError without a plan; ValueError or TypeError naming the argument.
        """
        if self._table is None or self._qo_indptr is None:
            raise PlanError("run(): expected plan() to have been called for this step; got no plan.")
        spec = self.spec
        if self._mask_moves and self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "custom_mask: a graph would read a mask that the next plan() frees. Use a MaskBuffer."
            )
        expect_caches(spec, q, k_cache, v_cache)
        if out is None:
            out = q.new_empty(q.shape[0], spec.num_qo_heads, spec.head_dim_v)
        expect_given("alibi_slopes", alibi_slopes, spec.alibi)
        expect_given("sinks", sinks, spec.sinks)
        if self._variant is None and variant_args:
            raise ValueError("variant_args: expected None without a variant; got some.")
        arguments = kernels.arguments(
            spec,
            q,
            k_cache,
            v_cache,
            self._qo_indptr,
            self._table,
            self._mask,
            self._plan_buffer.tensor,
            self._capacity,
            self._workspace,
            ops.scale_tensor("k_scale", k_scale, self.device),
            ops.scale_tensor("v_scale", v_scale, self.device),
            alibi_slopes,
            sinks,
            out,
            lse,
            self.num_ctas,
        )
        values = None if self._variant is None else self._variant.values(variant_args)
        attention_call.run_attention(self._kernel, arguments, values)
        if self.device.type == "cuda" and env.debug():
            self._plan_buffer.raise_faults(self.planner.layout)
        return out
