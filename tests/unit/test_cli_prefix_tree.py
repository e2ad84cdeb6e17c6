# SPDX-License-Identifier: Apache-2.0
"""The prefix tree of `explain` against the definition of a common prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fi_backend.cli.prefix_tree import (
    PrefixNode,
    build_prefix_tree,
    computed_full_pages,
    request_order,
    tokens_saved,
)

ROWS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def nodes(rows: list[list[int]]) -> list[PrefixNode]:
    return [node for root in build_prefix_tree(rows) for node in root.walk()]


@given(ROWS)
def test_a_request_s_nodes_spell_its_row(rows: list[list[int]]) -> None:
    for request, row in enumerate(rows):
        runs = [node for node in nodes(rows) if request in node.requests]
        assert [page for node in runs for page in node.pages] == row
        assert [node.first_page for node in runs] == [
            sum(len(n.pages) for n in runs[:i]) for i in range(len(runs))
        ]


@given(ROWS)
def test_a_node_is_shared_by_exactly_the_requests_with_that_prefix(rows: list[list[int]]) -> None:
    for node in nodes(rows):
        prefix = rows[node.requests[0]][: node.end_page]
        assert node.requests == [r for r, row in enumerate(rows) if row[: node.end_page] == prefix]


@given(ROWS)
def test_no_run_could_be_longer(rows: list[list[int]]) -> None:
    for node in nodes(rows):
        assert node.pages
        following = {tuple(rows[r][node.end_page : node.end_page + 1]) for r in node.requests}
        assert len(following) > 1 or following == {()}


@given(ROWS)
def test_sharers_are_neighbours_in_the_order(rows: list[list[int]]) -> None:
    order = request_order(build_prefix_tree(rows), len(rows))
    assert sorted(order) == list(range(len(rows)))
    for node in nodes(rows):
        lanes = sorted(order.index(request) for request in node.requests)
        assert lanes == list(range(lanes[0], lanes[0] + len(lanes)))


@given(ROWS)
def test_saved_tokens_are_the_copies_of_distinct_prefixes(rows: list[list[int]]) -> None:
    distinct = {tuple(row[: depth + 1]) for row in rows for depth in range(len(row))}
    copies = sum(len(row) for row in rows) - len(distinct)
    assert tokens_saved(build_prefix_tree(rows), 16) == 16 * copies


def test_a_chain_as_deep_as_the_batch() -> None:
    rows = [list(range(depth)) for depth in range(1, 1501)]
    found = nodes(rows)
    assert len(found) == 1500
    assert request_order(build_prefix_tree(rows), 1500) == list(range(1500))


def test_only_full_pages_that_were_computed_before_count() -> None:
    rows = [[1, 2, 3], [1, 2, 3], [4, 5, 6]]
    # 12 tokens of which 1 is new: 11 were there, two pages of 4; all 12 new: none.
    assert computed_full_pages(rows, [12, 12, 9], [1, 12, 0], 4) == [[1, 2], [], [4, 5]]
