# SPDX-License-Identifier: Apache-2.0
"""The prefix forest of a batch: which requests begin with the same pages, and how far."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fi_backend.core.index_arrays import (
    as_library_of,
    as_numpy,
    dtype_name,
    expect_array,
    is_contiguous,
    on_host,
    size_of,
)
from fi_backend.core.page_table import PageTable
from fi_backend.core.planner import module
from fi_backend.core.prefix_paths import nodes_of_paths

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

# Nodes on the way from a root that are looked for. Below it, requests read their keys for themselves.
MAX_DEPTH = 8
PARENT, BEGIN, END, MEMBER_BEGIN, MEMBER_END = range(5)


def _expect_int32(name: str, tensor: Tensor) -> None:
    expect_array(name, tensor)
    if dtype_name(tensor.dtype) != "int32":
        raise TypeError(f"{name}: expected int32; got {tensor.dtype}.")
    if not on_host(tensor):
        raise ValueError(f"{name}: expected a host tensor; got one on {tensor.device}.")


def _expect_shareable(tensor: Tensor, requests: int) -> None:
    _expect_int32("shareable", tensor)
    if tensor.shape != (requests,):
        raise ValueError(
            f"shareable: expected {requests} entries, one a request; got shape {tuple(tensor.shape)}."
        )


def _expect_depth(max_depth: int) -> None:
    if max_depth < 1:
        raise ValueError(f"max_depth: expected 1 or more; got {max_depth}.")


def shareable(q_lens: Tensor, kv_lens: Tensor, page_size: int, group: int, max_tile: int) -> Tensor:
    """Return how many leading KV tokens of each request may be read together with others, int32 [requests].

    q_lens, kv_lens: host int32 [requests]; page_size: tokens; group: query heads of one KV head; max_tile:
    the greatest query tile in packed rows. Full pages that lie before every query of this step count, so that
    neither a mask nor a page that this step writes is met; 0 where the queries need more than one tile.
    """
    _expect_int32("q_lens", q_lens)
    _expect_int32("kv_lens", kv_lens)
    q = as_numpy(q_lens)  # whose operators take a fifth of torch's time
    computed = np.maximum(np.maximum(as_numpy(kv_lens), 0) - q, 0)
    computed -= computed % page_size
    computed *= (q >= 1) & (q <= max_tile // group)
    made: Tensor = as_library_of(q_lens, computed)
    return made


@dataclass(frozen=True, slots=True, eq=False)
class PrefixForest:
    """Runs of pages that several requests read.

    nodes: host int32 [nodes, 5], rows of (parent or -1, begin, end, member_begin, member_end): the requests
        members[member_begin:member_end], two or more and ascending, read the same pages for the KV tokens
        begin .. end. A root begins at 0, a child where its parent ends. By their first member, those with
        the same one from the root on, so that parents come before their children.
    members: host int32.

    Equal sharing gives equal tensors, whatever they were made from. Raises ValueError or TypeError that names
    the field.
    """

    nodes: Tensor
    members: Tensor

    def __post_init__(self) -> None:
        _expect_int32("nodes", self.nodes)
        _expect_int32("members", self.members)
        if self.nodes.ndim != 2 or self.nodes.shape[1] != 5 or not is_contiguous(self.nodes):
            raise ValueError(f"nodes: expected contiguous [nodes, 5]; got {tuple(self.nodes.shape)}.")
        if self.members.ndim != 1 or not is_contiguous(self.members):
            raise ValueError(f"members: expected a contiguous vector; got {tuple(self.members.shape)}.")

    @property
    def num_nodes(self) -> int:
        """How many runs are shared; 0 when no two requests begin alike."""
        return self.nodes.shape[0]

    @classmethod
    def from_page_table(
        cls, table: PageTable, shareable: Tensor, *, max_depth: int = MAX_DEPTH
    ) -> PrefixForest:
        """Compare the leading pages of all rows of a page table on the host.

        shareable: host int32 [requests], KV tokens that may be shared (see shareable()), cut to whole pages.
        max_depth: nodes from a root on that are looked for. Page ids, or the first slots of pages, are
        compared exactly. Raises ValueError when a row holds fewer pages.
        """
        _expect_shareable(shareable, table.num_requests)
        _expect_depth(max_depth)
        if table.indices is None:
            return cls._of(shareable, np.empty((0, 5), np.int32), np.empty(0, np.int32))
        requests = table.num_requests
        nodes = np.empty((requests, 5), np.int32)
        members = np.empty(requests * max_depth, np.int32)
        size = np.empty(2, np.int64)
        module().find_forest(
            table.indices,
            table.row_begin,
            table.row_end,
            table.index_step,
            shareable,
            table.page_size,
            max_depth,
            nodes,
            members,
            size,
        )
        num_nodes, num_members = size.tolist()
        return cls._of(shareable, nodes[:num_nodes], members[:num_members])

    @classmethod
    def _of(cls, like: Tensor, nodes: npt.NDArray[np.int32], members: npt.NDArray[np.int32]) -> PrefixForest:
        return cls(as_library_of(like, nodes), as_library_of(like, members))

    @classmethod
    def of_step(
        cls,
        table: PageTable,
        qo_indptr: Tensor,
        kv_lens: Tensor,
        *,
        group: int,
        max_tile: int,
        limits: Tensor | None = None,
    ) -> PrefixForest:
        """Find what the requests of one step share, as BatchAttention.plan(detect_prefixes=True) does.

        table: on the host; qo_indptr: host int32 [requests + 1]; kv_lens: host int32 [requests], exact;
        group, max_tile: see shareable(). limits: host int32 [requests], at most so many KV tokens of each
        request are shared.
        """
        if table.indices is not None and not on_host(table.indices):
            raise ValueError(
                "page_table: expected a host table, where the lengths are; got one on "
                f"{table.indices.device}."
            )
        _expect_int32("qo_indptr", qo_indptr)
        _expect_int32("kv_lens", kv_lens)
        requests = size_of(kv_lens)
        if qo_indptr.shape != (requests + 1,):
            raise ValueError(
                f"qo_indptr: expected {requests + 1} entries, one more than kv_lens; got shape "
                f"{tuple(qo_indptr.shape)}."
            )
        q_lens = qo_indptr[1:] - qo_indptr[:-1]
        may = shareable(q_lens, kv_lens.reshape(-1), table.page_size, group, max_tile)
        if limits is not None:
            _expect_shareable(limits, requests)
            may = as_library_of(may, np.maximum(np.minimum(as_numpy(may), as_numpy(limits)), 0))
        return cls.from_page_table(table, may)

    @classmethod
    def from_block_table(
        cls, block_table: Tensor, shareable: Tensor, page_size: int, *, max_depth: int = MAX_DEPTH
    ) -> PrefixForest:
        """Compare the rows of a padded block table.

        block_table: host int32 [requests, width], page ids, unit column stride; shareable, max_depth: see
        from_page_table().
        """
        _expect_shareable(shareable, block_table.shape[0])
        table = PageTable.from_block_table(block_table, shareable, page_size=page_size)
        return cls.from_page_table(table, shareable, max_depth=max_depth)

    @classmethod
    def from_token_table(
        cls,
        token_table: Tensor,
        rows: Tensor,
        shareable: Tensor,
        page_size: int,
        *,
        max_depth: int = MAX_DEPTH,
    ) -> PrefixForest:
        """Compare rows of a table of token slots, such as SGLang's req_to_token.

        token_table: host int32 [slots, width], the KV slot of every token; rows: host integers [requests];
        shareable, max_depth: see from_page_table().
        """
        _expect_shareable(shareable, rows.shape[0])
        table = PageTable.from_token_table(token_table, rows, shareable, page_size=page_size)
        return cls.from_page_table(table, shareable, max_depth=max_depth)

    @classmethod
    def from_paths(
        cls,
        paths: Sequence[Sequence[tuple[Hashable, int]]],
        shareable: Tensor,
        *,
        max_depth: int = MAX_DEPTH,
    ) -> PrefixForest:
        """Take the sharing from the paths of a radix tree, without looking at pages.

        paths: for each request (key of a tree node, depth in KV tokens at which the node ends), from the root
            on. Requests share exactly the nodes with which their paths begin. shareable, max_depth: see
            from_page_table(). A path may end before.
        """
        _expect_shareable(shareable, len(paths))
        _expect_depth(max_depth)
        nodes, members = nodes_of_paths(paths, shareable.tolist(), max_depth)
        rows = np.array(nodes, np.int32).reshape(-1, 5)
        return cls._of(shareable, rows, np.array(members, np.int32))
