# SPDX-License-Identifier: Apache-2.0
"""The prefix tree that a block table already is: requests with equal leading pages share their KV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixNode:
    """A run of pages that the same requests begin with.

    first_page: its depth, in pages from the start of the requests. pages: the page ids of the run.
    requests: who shares it, ascending. children: the runs that follow, by smallest request.
    """

    first_page: int
    pages: list[int]
    requests: list[int]
    children: list[PrefixNode] = field(default_factory=list)

    @property
    def end_page(self) -> int:
        """Depth at which the run ends, in pages."""
        return self.first_page + len(self.pages)

    def walk(self) -> Iterator[PrefixNode]:
        """Yield this node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


def build_prefix_tree(rows: Sequence[Sequence[int]]) -> list[PrefixNode]:
    """Return the roots of the compressed trie of `rows`.

    rows: for each request, the ids of its full, computed pages. A request without any appears nowhere.
    """
    return _group(rows, [r for r, row in enumerate(rows) if row], 0)


def _group(rows: Sequence[Sequence[int]], requests: list[int], depth: int) -> list[PrefixNode]:
    roots: list[PrefixNode] = []
    # An explicit stack: a chain of requests that each leave one page later would be as deep as the batch.
    pending = [(roots, requests, depth)]
    while pending:
        siblings, members, begin = pending.pop()
        by_page: dict[int, list[int]] = {}
        for request in members:
            if len(rows[request]) > begin:
                by_page.setdefault(rows[request][begin], []).append(request)
        for group in by_page.values():
            end = _common_end(rows, group, begin)
            node = PrefixNode(begin, list(rows[group[0]][begin:end]), group)
            siblings.append(node)
            pending.append((node.children, group, end))
    return roots


def _common_end(rows: Sequence[Sequence[int]], group: list[int], begin: int) -> int:
    """Depth of the first page at which the rows of `group` differ or one of them ends."""
    first = rows[group[0]]
    end = len(first)
    for request in group[1:]:
        other = rows[request]
        end = min(end, len(other))
        depth = begin
        while depth < end and other[depth] == first[depth]:
            depth += 1
        end = depth
    return end


def computed_full_pages(
    rows: Sequence[Sequence[int]], kv_lens: Sequence[int], q_lens: Sequence[int], page_size: int
) -> list[list[int]]:
    """Cut `rows` (page ids of each request) to the pages that are full and were computed before this step.

    Only those can be shared: the tokens of this step are being written now.
    """
    return [
        list(row[: max(kv - q, 0) // page_size]) for row, kv, q in zip(rows, kv_lens, q_lens, strict=True)
    ]


def request_order(roots: Sequence[PrefixNode], num_requests: int) -> list[int]:
    """All requests in the order in which the tree's leaves come, those outside the tree at the end."""
    order = [request for root in roots for node in root.walk() for request in _ending_here(node)]
    inside = set(order)
    return order + [request for request in range(num_requests) if request not in inside]


def _ending_here(node: PrefixNode) -> list[int]:
    below = {request for child in node.children for request in child.requests}
    return [request for request in node.requests if request not in below]


def tokens_saved(roots: Sequence[PrefixNode], page_size: int) -> int:
    """KV tokens that need not be read again when every shared run is read once."""
    return sum(
        (len(node.requests) - 1) * len(node.pages) * page_size for root in roots for node in root.walk()
    )
