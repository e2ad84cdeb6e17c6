# SPDX-License-Identifier: Apache-2.0
"""The plan of one step, as named arrays over its buffer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

PLAN_VERSION = 6
FIRST_CHUNK = 1
LAST_CHUNK = 2
PREFIX = 4
SUFFIX = 8
PLAN_MAGIC = 0x50494621

WORK_ITEM = np.dtype(
    [
        ("flags", "u1"),
        ("tile_log2", "u1"),
        ("q_rows", "<u2"),
        ("request", "<i4"),
        ("q_begin", "<i4"),
        ("kv_begin", "<i4"),
        ("kv_end", "<i4"),
        ("partial", "<i4"),
        ("unit", "<i4"),
        ("cost", "<i4"),
    ]
)
MERGE_UNIT = np.dtype(
    [
        (name, "<i4")
        for name in (
            "request",
            "q_begin",
            "q_rows",
            "num_items",
            "parts_begin",
            "parts_end",
            "token",
            "reserved",
        )
    ]
)
PREFIX_NODE = np.dtype([(name, "<i4") for name in ("request", "tokens_begin", "num_tokens", "kv_end")])
HEADER = np.dtype(
    [
        (name, "<i4")
        for name in (
            "magic",
            "version",
            "num_requests",
            "num_tokens",
            "num_items",
            "num_units",
            "num_parts",
            "num_partial_rows",
            "chunk",
            "num_ctas",
            "num_kv_heads",
            "group",
            "invariant_grid",
            "num_queues",
            "max_kv_len",
            "num_nodes",
            "num_node_tokens",
            "num_reports",
            "bundled_by_2",
            "bundled_by_4",
            "bundled_by_8",
        )
    ]
    + [("reserved", "<i4", 11)]
)
_NUM_NODES = HEADER.fields["num_nodes"][1] if HEADER.fields else 0


class PlanLayout(NamedTuple):
    """Byte offsets of the sections of a plan buffer; they depend on the capacity alone."""

    header: int
    items: int
    units: int
    parts: int
    kv_len_bounds: int
    queue_begin: int
    queue_entries: int
    nodes: int
    node_tokens: int
    reports: int
    counters: int
    total: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A read-only view of a plan buffer; it is valid until the next plan() on the same BatchAttention.

    buffer: uint8 [layout.total]. The sections are described in csrc/core/plan.h.
    """

    buffer: npt.NDArray[np.uint8]
    layout: PlanLayout

    @property
    def header(self) -> dict[str, int]:
        """Counts and constants of the plan by name."""
        record = self.buffer[: HEADER.itemsize].view(HEADER)[0]
        return {name: int(record[name]) for name in HEADER.names or () if name != "reserved"}

    @property
    def num_nodes(self) -> int:
        """Prefix nodes of the plan, without decoding the rest of the header."""
        return int(self.buffer[_NUM_NODES : _NUM_NODES + 4].view(np.int32)[0])

    @property
    def items(self) -> npt.NDArray[Any]:
        """Work items, those of prefix nodes and then longest first: structured array of dtype WORK_ITEM."""
        return self._section(self.layout.items, WORK_ITEM, self.header["num_items"])

    @property
    def units(self) -> npt.NDArray[Any]:
        """Merge units of the reduction map: structured array of dtype MERGE_UNIT."""
        return self._section(self.layout.units, MERGE_UNIT, self.header["num_units"])

    @property
    def parts(self) -> npt.NDArray[Any]:
        """int32: first partial row of each part, in the order in which they are merged."""
        return self._section(self.layout.parts, np.dtype("<i4"), self.header["num_parts"])

    @property
    def kv_len_bounds(self) -> npt.NDArray[Any]:
        """int32 [requests]: the KV lengths that the plan was made for."""
        return self._section(self.layout.kv_len_bounds, np.dtype("<i4"), self.header["num_requests"])

    @property
    def nodes(self) -> npt.NDArray[Any]:
        """Prefix nodes, whose keys are read once for all members: structured array of dtype PREFIX_NODE."""
        return self._section(self.layout.nodes, PREFIX_NODE, self.header["num_nodes"])

    @property
    def node_tokens(self) -> npt.NDArray[Any]:
        """int32: query tokens of the nodes, counted over all requests."""
        return self._section(self.layout.node_tokens, np.dtype("<i4"), self.header["num_node_tokens"])

    @property
    def reports(self) -> npt.NDArray[Any]:
        """int32: lists of the merge units that a node tile reports to, each after its length."""
        return self._section(self.layout.reports, np.dtype("<i4"), self.header["num_reports"])

    @property
    def queues(self) -> list[npt.NDArray[Any]]:
        """Per CTA, the (item, KV head) pairs of Algorithm 1, int32 [n, 2]; empty without planned queues."""
        header = self.header
        if not header["num_queues"]:
            return []
        begin = self._section(self.layout.queue_begin, np.dtype("<i4"), header["num_queues"] + 1)
        entries = self._section(self.layout.queue_entries, np.dtype("<i4"), int(begin[-1]))
        pairs = np.stack(np.divmod(entries, header["num_kv_heads"]), axis=1)
        return [pairs[a:b] for a, b in pairwise(begin)]

    def tobytes(self) -> bytes:
        """The bytes of all sections in use; equal lengths give equal bytes."""
        arrays: list[npt.NDArray[Any]] = [
            self.items,
            self.units,
            self.parts,
            self.kv_len_bounds,
            *self.queues,
            self.nodes,
            self.node_tokens,
            self.reports,
        ]
        return self.buffer[: HEADER.itemsize].tobytes() + b"".join(a.tobytes() for a in arrays)

    def _section(self, offset: int, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
        view = self.buffer[offset : offset + count * dtype.itemsize].view(dtype)
        view.flags.writeable = False
        return view
