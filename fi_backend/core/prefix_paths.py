# SPDX-License-Identifier: Apache-2.0
"""Paths in an engine's radix tree to the nodes of a prefix forest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import NamedTuple

_Path = Sequence[tuple[Hashable, int]]


class _Group(NamedTuple):
    leader: int  # first of the requests; with the depth, the order of nodes
    depth: int
    parent: int
    begin: int  # KV tokens
    segment: int  # of the paths, which are equal before it and in its key
    requests: list[int]


def nodes_of_paths(
    paths: Sequence[_Path], shareable: Sequence[int], max_depth: int
) -> tuple[list[tuple[int, int, int, int, int]], list[int]]:
    """Return the nodes and the members of a PrefixForest.

    paths: (key, end in KV tokens) of each request's tree nodes from the root on, ends increasing; shareable:
    KV tokens that a request may share. Raises ValueError naming the path.
    """
    for request, path in enumerate(paths):
        ends = [0, *(end for _, end in path)]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"paths[{request}]: expected increasing ends from above 0; got {ends[1:]}.")
    limits = [min(path[-1][1], tokens) if path else 0 for path, tokens in zip(paths, shareable, strict=True)]
    nodes: list[tuple[int, int, int, int, int]] = []
    members: list[int] = []
    pending = _groups(paths, [r for r, limit in enumerate(limits) if limit > 0], -1, 0, 0, 0)
    heapify(pending)
    while pending:
        group = heappop(pending)
        if group.depth >= max_depth:
            continue
        end, segment = _common_end(paths, limits, group)
        first = len(members)
        members += group.requests
        nodes.append((group.parent, group.begin, end, first, len(members)))
        longer = [r for r in group.requests if limits[r] > end]
        for child in _groups(paths, longer, len(nodes) - 1, group.depth + 1, end, segment):
            heappush(pending, child)
    return nodes, members


def _groups(
    paths: Sequence[_Path], requests: list[int], parent: int, depth: int, begin: int, segment: int
) -> list[_Group]:
    """The requests by the key of their next segment, two or more each."""
    by_key: dict[Hashable, list[int]] = {}
    for request in requests:
        by_key.setdefault(paths[request][segment][0], []).append(request)
    return [
        _Group(group[0], depth, parent, begin, segment, group) for group in by_key.values() if len(group) > 1
    ]


def _common_end(paths: Sequence[_Path], limits: Sequence[int], group: _Group) -> tuple[int, int]:
    """KV tokens up to which all of the group go together, and the segment that follows there."""
    limit = min(limits[r] for r in group.requests)
    segment = group.segment
    first = paths[group.requests[0]]
    while True:
        end = first[segment][1]
        for request in group.requests:
            if paths[request][segment][1] != end:
                raise ValueError(
                    f"paths[{request}]: expected node {first[segment][0]!r} to end at {end} tokens, as on "
                    f"other paths; got {paths[request][segment][1]}."
                )
        if end > limit:
            return limit, segment
        segment += 1
        if end == limit or len({paths[r][segment][0] for r in group.requests}) > 1:
            return end, segment
