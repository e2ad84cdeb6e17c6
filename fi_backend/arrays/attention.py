# SPDX-License-Identifier: Apache-2.0
"""Attention of a batch of requests on arrays of any library: plan once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fi_backend.arrays.arguments import ArrayArguments, scale_view
from fi_backend.arrays.host import HostPlace, HostStep
from fi_backend.arrays.library import Array, device_of, expect_array, library_of
from fi_backend.arrays.native import advised
from fi_backend.arrays.page_table import PageTable, expect_table
from fi_backend.arrays.place import place
from fi_backend.arrays.result import allocated, given
from fi_backend.arrays.view import host_masks, host_view, view
from fi_backend.core import kernels
from fi_backend.core.custom_mask import PackedMask, pack_bits, pack_for
from fi_backend.core.layout_checks import expect_given, expect_layout
from fi_backend.core.plan import Plan
from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step_forest import expect_one_source, found, shares
from fi_backend.core.support import MAX_KV_LEN, cost_model, query_tiles, unsupported_reason
from fi_backend.core.variant import AttentionVariant
from fi_backend.core.variant_names import find_variant
from fi_backend.errors import PlanError, UnsupportedError

_Scale = float | Array


class BatchAttention:
    """Attention over paged or contiguous KV for up to `max_requests` requests a step, without torch.

    spec: what is fixed for the layer. max_requests, max_tokens: of one step (query tokens of all requests
    together). max_kv_len: KV tokens of one request. device: where q and the caches live, "cpu" or "cuda:0".
    num_ctas: workers to balance over (default: OpenMP's threads, or one a multiprocessor). planned_queues,
    costs, sharing, kernel: as for fi_backend.BatchAttention. variant: functors of the user, or the name of a
    registered variant.

    Scratch memory is allocated here. Raises UnsupportedError when the spec cannot run on the device.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        max_requests: int,
        max_tokens: int,
        max_kv_len: int,
        device: object = "cpu",
        num_ctas: int | None = None,
        planned_queues: bool = False,
        costs: CostModel | None = None,
        sharing: SharingLimits | None = None,
        variant: AttentionVariant | str | None = None,
        kernel: str | None = None,
    ) -> None:
        self.variant = find_variant(variant)
        if reason := unsupported_reason(spec, str(device), self.variant):
            raise UnsupportedError(reason)
        if max_kv_len > MAX_KV_LEN:
            raise ValueError(f"max_kv_len: expected at most {MAX_KV_LEN}; got {max_kv_len}.")
        self.spec = spec
        self._place = place(device)
        self.device = self._place.device
        self.num_ctas = self._place.workers() if num_ctas is None else num_ctas
        self.planner = Planner(
            spec,
            Limits(max_requests, max_tokens, max_kv_len),
            num_ctas=self.num_ctas,
            costs=cost_model(spec, self.device, costs),
            planned_queues=planned_queues,
            tiles=query_tiles(spec, self.device, self.variant, arch=self._place.arch, kernel=kernel),
            sharing=sharing,
            variant=self.variant,
        )
        plain = (
            kernels.attention_module(spec, "cpu", self.variant, kernel)
            if isinstance(self._place, HostPlace)
            else kernels.cuda_attention_module(spec, self._place.arch, self.variant, kernel)
        )
        module = kernels.load_attention(kernels.with_variant(plain, self.variant), self.variant)
        self._place.prepare(module)
        self._run = module.run
        self._variant = ArrayArguments(self.variant, self._place) if self.variant else None
        self._capacity = view("capacity", np.array(self.planner.capacity, dtype=np.int64))
        self._workspace = self._place.empty(self.planner.scratch_bytes)
        self._place.scale(1.0)
        self._step = self._new_step(max_requests)
        self._table: PageTable | None = None
        self._qo_indptr: Any = None
        self._mask: PackedMask | None = None
        self._captured: list[Any] = []

    def _new_step(self, max_requests: int) -> Any:
        size = self.planner.layout.total
        if isinstance(self._place, HostPlace):
            return HostStep(size)
        from fi_backend.arrays.cuda import CudaStep

        return CudaStep(size, max_requests, self._place.index)

    def plan(
        self,
        qo_indptr: Array,
        page_table: PageTable,
        *,
        custom_mask: Array | Sequence[Array] | None = None,
        forest: PrefixForest | None = None,
        detect_prefixes: bool = False,
        shareable: Array | None = None,
        stream: object = None,
    ) -> Plan:
        """Balance one step; every layer of the step then calls run().

        qo_indptr: int32 [requests + 1] in host memory, first query token of each request. page_table: where
        the KV of the same requests lies.
        custom_mask: bool in host memory; one [q_len, kv_len] or [q_len, heads, kv_len] a request, or all of
            them as one vector. Needs a spec with custom_mask=True. On CUDA the call waits for its upload.
        forest, detect_prefixes, shareable: as for fi_backend.BatchAttention; prefixes are looked for in
            tables of the host. Needs `sharing`.
        stream: of CUDA, on which the plan and the index arrays are uploaded (default: the current one of the
        table's library, CUDA's default stream for contiguous KV); up to four uploads may be under way. Call
        it outside of the capture of a graph, and again before each replay: addresses stay, and replays see
        the upload if they are queued on this stream after it.

        On a CPU, run() reads qo_indptr, the lengths and the table where they lie, on CUDA the table alone:
        what was written into them meanwhile counts, within the limits of the plan. Returns a view of the
        plan, valid until the next call. Raises PlanError (a ValueError) or TypeError naming the argument when
        an input breaks a limit; the previous plan then stays.
        """
        starts = host_view("qo_indptr", qo_indptr)
        expect_table(self.spec, self.device, starts, page_table)
        expect_one_source(forest, detect_prefixes, shareable)
        handle = self._place.stream_of(stream, page_table.source)
        table = page_table
        indices: Any = None
        if table.indices is not None:
            indices = view("page_table", table.source, stream=handle)
        mask = pack_for(self.spec, host_masks(custom_mask), starts, table.kv_lens, None, self._packed)
        if detect_prefixes or forest is not None:
            forest = self._forest(forest, starts, replace(table, indices=indices), shareable)
        host, buffer = self._step.host()
        try:
            with advised():
                lens = view("kv_lens", table.kv_lens)
                self.planner.plan(view("qo_indptr", starts), lens, buffer, forest)
        except ValueError as error:
            raise PlanError(str(error)) from None
        arrays = (starts, table.row_begin, table.row_end, table.kv_lens)
        self._qo_indptr, begin, end, lens = self._step.publish(arrays, handle)
        # The views keep what they are of alive until the next plan.
        self._table = PageTable(
            indices, begin, end, lens, table.page_size, table.index_step, table.index_divisor, table.source
        )
        self._mask = mask
        read_only = host.view()
        read_only.flags.writeable = False
        return Plan(read_only, self.planner.layout)

    def _forest(
        self, forest: PrefixForest | None, starts: Any, table: PageTable, limits: Array | None
    ) -> PrefixForest | None:
        """What is given, or found where nothing is; None where the layer does not share."""
        name = "detect_prefixes" if forest is None else "forest"
        if not shares(self.spec, self.variant, self.planner.sharing, name):
            return None
        if forest is not None:
            return forest
        begin, end = view("row_begin", table.row_begin), view("row_end", table.row_end)
        table = replace(table, row_begin=begin, row_end=end)
        most = None if limits is None else host_view("shareable", limits)
        return found(self.spec, self.planner.tiles[1], table, (starts, table.kv_lens), most)

    def _packed(
        self, mask: Any, q_lens: Any, kv_lens: Any, _: object, *, num_heads: Collection[int]
    ) -> PackedMask:
        packed = pack_bits(mask, q_lens, kv_lens, num_heads)
        bits, begin, lens = map(self._place.constant, (packed.bits, packed.begin, kv_lens.copy()))
        return PackedMask(bits, begin, lens, packed.num_heads)

    def run(
        self,
        q: Array,
        k_cache: Array,
        v_cache: Array,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        k_scale: _Scale = 1.0,
        v_scale: _Scale = 1.0,
        alibi_slopes: Array | None = None,
        sinks: Array | None = None,
        variant_args: Mapping[str, float | Array] | None = None,
        stream: object = None,
    ) -> Any:
        """Compute attention of the planned step.

        q: [tokens, num_qo_heads, head_dim] of spec.dtype, last dimension contiguous; rows past the planned
            tokens are ignored. k_cache: [pages, page_size, num_kv_heads, head_dim], v_cache the same with
            head_dim_v, of spec.kv_dtype, any strides with a contiguous last dimension; contiguous KV:
            [total, num_kv_heads, head_dim]. bfloat16 and fp8 are those of the library or of ml_dtypes, or
            raw bits as uint16 and uint8.
        out: [tokens, num_qo_heads, head_dim_v] of spec.dtype (default: a new array of q's library). lse:
            float32 [tokens, num_qo_heads], natural log, written when given; return_lse: return it, in a new
            array where none is given. Rows that see no key get o = 0, lse = -inf, rows of no request are not
            written. Results that are given must be writable, which JAX's arrays are not.
        k_scale, v_scale, alibi_slopes, sinks, variant_args: as for fi_backend.BatchAttention.run().
        stream: of CUDA, an int or an object with __cuda_stream__ (default: the current one of q's library;
            for JAX, CUDA's default stream, and the call waits until the result is there).

        Returns out, or (out, lse) with return_lse. Raises PlanError without a plan; ValueError or TypeError
        naming the argument.
        """
        if self._table is None:
            raise PlanError("run(): expected plan() to have been called for this step; got no plan.")
        spec = self.spec
        self._expect_here(q=q, k_cache=k_cache, v_cache=v_cache)
        handle = self._place.stream_of(stream, q)
        if self._mask is not None and self._place.is_capturing(handle):
            raise UnsupportedError("custom_mask: a graph would read a mask that the next plan() frees.")
        queries = view("q", q, stream=handle, raw=spec.dtype)
        keys = view("k_cache", k_cache, stream=handle, raw=spec.kv_dtype)
        values = view("v_cache", v_cache, stream=handle, raw=spec.kv_dtype)
        expect_layout(spec, queries, keys, values)
        for name, array, wanted in (("alibi_slopes", alibi_slopes, spec.alibi), ("sinks", sinks, spec.sinks)):
            expect_given(name, array, wanted)  # type: ignore[arg-type]
        if self._variant is None and variant_args:
            raise ValueError("variant_args: expected None without a variant; got some.")
        shape = (queries.shape[0], spec.num_qo_heads, spec.head_dim_v)
        if out is None:
            to = allocated(q, shape, stream=handle, raw=spec.dtype)
        else:
            to = given("out", out, stream=handle, raw=spec.dtype)
        sums = None
        if lse is not None:
            sums = given("lse", lse, stream=handle)
        elif return_lse:
            sums = allocated(q, shape[:2], stream=handle, dtype="float32")
        *inputs, num_ctas, written, lse_written = kernels.arguments(
            spec,
            queries,
            keys,
            values,
            self._qo_indptr,
            self._table,
            self._mask,
            self._step.plan,
            self._capacity,
            self._workspace,
            scale_view("k_scale", k_scale, self._place, handle),
            scale_view("v_scale", v_scale, self._place, handle),
            None if alibi_slopes is None else view("alibi_slopes", alibi_slopes, stream=handle),
            None if sinks is None else view("sinks", sinks, stream=handle),
            to.view,
            None if sums is None else sums.view,
            self.num_ctas,
        )
        of_variant = () if self._variant is None else self._variant.call(variant_args, handle)
        options = self._place.call_options(num_ctas)
        self._step.order(handle)
        with advised(), self._place.using(handle):
            self._run(*inputs, *options, written, lse_written, *of_variant)
        self._step.launched(handle)
        if self._place.is_capturing(handle):
            # A graph reads and writes these at every replay.
            self._captured.append((inputs, written, lse_written, of_variant))
        self._step.expect_no_faults(self.planner.layout, handle)
        self._place.finish(library_of(q), handle)
        return (to.deliver(), sums.deliver()) if return_lse and sums is not None else to.deliver()

    def _expect_here(self, **arrays: Array) -> None:
        for name, array in arrays.items():
            expect_array(name, array)
            if (lies := device_of(name, array)) != self.device:
                raise ValueError(f"{name}: expected an array on {self.device}; got one on {lies}.")
