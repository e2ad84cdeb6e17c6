# SPDX-License-Identifier: Apache-2.0
"""What engine_run.py does to a run on purpose: it breaks the back end, or watches it more closely."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

# What a run records, in the order of its plans.
RECORDS: list[dict[str, int]] = []


def _ignore_last_page() -> AbstractContextManager[Any]:
    """Make every plan and run believe that the last page of each request is not there."""
    from fi_backend.core.page_table import PageTable

    original = PageTable.from_block_table

    def shortened(block_table: Any, kv_lens: Any, *, page_size: int) -> PageTable:
        return original(block_table, (kv_lens - page_size).clamp_min(0), page_size=page_size)

    return patch.object(PageTable, "from_block_table", shortened)


def _drop_appends() -> AbstractContextManager[Any]:
    """Write no keys and values of decoding steps into the cache."""
    from fi_backend.adapters.vllm import impl

    original = impl.append_kv

    def lossy(key: Any, value: Any, k_cache: Any, v_cache: Any, slots: Any, **scales: Any) -> None:
        if slots.shape[0] > 64:
            original(key, value, k_cache, v_cache, slots, **scales)

    return patch.object(impl, "append_kv", lossy)


def _louder_queries() -> AbstractContextManager[Any]:
    """Make every softmax scale two percent too large."""
    from fi_backend.core.attention import BatchAttention

    original = BatchAttention.run

    def louder(self: BatchAttention, q: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, q * 1.02, *args, **kwargs)

    return patch.object(BatchAttention, "run", louder)


def _shorten_items() -> AbstractContextManager[Any]:
    """Let the native kernels run plans in which every query tile lacks the last 16 keys."""
    from fi_backend.core.attention import BatchAttention
    from fi_backend.core.plan import WORK_ITEM

    original = BatchAttention.plan

    def damaged(self: BatchAttention, *args: Any, **kwargs: Any) -> Any:
        plan = original(self, *args, **kwargs)
        start = plan.layout.items
        items = self._plan_buffer.tensor.numpy()[start : start + plan.items.nbytes].view(WORK_ITEM)
        last: dict[tuple[int, int], int] = {}
        for item in items:
            tile = int(item["request"]), int(item["q_begin"])
            last[tile] = max(last.get(tile, 0), int(item["kv_end"]))
        for item in items:
            seen = last[int(item["request"]), int(item["q_begin"])] - 16
            item["kv_end"] = max(item["kv_begin"], min(item["kv_end"], seen))
            item["flags"] &= 1  # the last chunk would find the true end again
        return plan

    return patch.object(BatchAttention, "plan", damaged)


def _no_sync() -> AbstractContextManager[Any]:
    """Raise RuntimeError where a step would make the host wait for the GPU."""
    import torch

    from fi_backend.adapters.vllm.impl import FiAttentionImpl
    from fi_backend.adapters.vllm.metadata import FiMetadataBuilder

    def strict(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return call

    stack = ExitStack()
    for owner, name in (
        (FiMetadataBuilder, "build"),
        (FiMetadataBuilder, "build_for_drafting"),
        (FiAttentionImpl, "forward"),
        (FiAttentionImpl, "do_kv_cache_update"),
    ):
        stack.enter_context(patch.object(owner, name, strict(getattr(owner, name))))
    return stack


def _check_faults() -> AbstractContextManager[Any]:
    """Raise ValueError before the next step when kernels met lengths or pages that cannot be."""
    from fi_backend.core.attention import BatchAttention

    original = BatchAttention.plan

    def checked(self: BatchAttention, *args: Any, **kwargs: Any) -> Any:
        self._plan_buffer.raise_faults(self.planner.layout)
        return original(self, *args, **kwargs)

    return patch.object(BatchAttention, "plan", checked)


def _equal_by_their_first_page() -> AbstractContextManager[Any]:
    """Take requests whose first pages are equal for equal as far as both are long."""
    from fi_backend.core.page_table import PageTable
    from fi_backend.core.prefix_forest import PrefixForest

    original = PrefixForest.from_page_table

    def careless(table: PageTable, shareable: Any, **options: Any) -> PrefixForest:
        assert table.indices is not None
        pages = table.indices.clone()
        pages[:, 1:] = pages[:1, 1:]
        same = PageTable.from_block_table(pages, table.kv_lens, page_size=table.page_size)
        return original(same, shareable, **options)

    return patch.object(PrefixForest, "from_page_table", careless)


def _wrong_representative() -> AbstractContextManager[Any]:
    """Let the native kernels look the pages of each prefix up in the row of another request."""
    from fi_backend.core.attention import BatchAttention
    from fi_backend.core.plan import PREFIX_NODE

    original = BatchAttention.plan

    def damaged(self: BatchAttention, *args: Any, **kwargs: Any) -> Any:
        plan = original(self, *args, **kwargs)
        start = plan.layout.nodes
        nodes = self._plan_buffer.tensor.numpy()[start : start + plan.nodes.nbytes].view(PREFIX_NODE)
        nodes["request"] = (nodes["request"] + 1) % plan.header["num_requests"]
        return plan

    return patch.object(BatchAttention, "plan", damaged)


def _record_reads() -> AbstractContextManager[Any]:
    """Record of every plan: its requests and nodes, the KV tokens it reads, and what the tree would save."""
    from fi_backend.core.attention import BatchAttention

    original = BatchAttention.plan

    def recorded(self: BatchAttention, qo_indptr: Any, table: Any, **kwargs: Any) -> Any:
        plan = original(self, qo_indptr, table, **kwargs)
        items = plan.items
        q_lens, kv_lens = qo_indptr.diff().tolist(), table.kv_lens.tolist()
        group = self.spec.group_size
        pages = [
            tuple(row[: (kv - q) // table.page_size]) if 0 < q * group <= 128 else ()
            for row, q, kv in zip(table.indices.tolist(), q_lens, kv_lens, strict=True)
        ]
        saved = _saved_by_tree(pages, [q * group for q in q_lens]) * table.page_size
        read = int((items["kv_end"] - items["kv_begin"]).sum())
        RECORDS.append(
            {
                "requests": len(q_lens),
                "tokens": sum(q_lens),
                "nodes": plan.num_nodes,
                "read": read,
                "tree": saved,
            }
        )
        return plan

    return patch.object(BatchAttention, "plan", recorded)


def _saved_by_tree(rows: list[tuple[int, ...]], packed: list[int]) -> int:
    """Pages not read again if every common prefix is read once for each 128 packed rows of its requests."""
    together: dict[tuple[int, ...], list[int]] = {}
    for request, row in enumerate(rows):
        for depth in range(1, len(row) + 1):
            together.setdefault(row[:depth], []).append(request)
    saved = 0
    for requests in together.values():
        if len(requests) > 1:
            saved += len(requests) - -(-sum(packed[r] for r in requests) // 128)
    return saved


SABOTAGE: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "ignore_last_page": _ignore_last_page,
    "drop_appends": _drop_appends,
    "louder_queries": _louder_queries,
    "shorten_items": _shorten_items,
    "equal_by_their_first_page": _equal_by_their_first_page,
    "wrong_representative": _wrong_representative,
    # No sabotage, but stricter than a server, or more curious.
    "record_reads": _record_reads,
    "no_sync": _no_sync,
    "check_faults": _check_faults,
}
