# SPDX-License-Identifier: Apache-2.0
"""What SGLang's radix tree says about the requests of a batch, and the forests that come of it."""

from __future__ import annotations

import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_graph import Graph
from sglang_step import Engine

from fi_backend.adapters.sglang import compat
from fi_backend.adapters.sglang.radix import RadixPaths, SharedPrefixes
from fi_backend.core.counters import counters
from fi_backend.core.prefix_forest import PrefixForest, shareable

TILES = {"page_size": 1, "group": 2, "max_tile": 128}


class Tree:
    """SGLang's own tree, and the rows of slots of the requests that stand in it."""

    def __init__(self) -> None:
        self.cache = RadixCache.create_simulated()
        self.random = torch.Generator().manual_seed(1)
        self.slots = torch.randperm(20000, generator=self.random)
        self.used = 0
        self.system: list[int] = []

    def text(self, length: int) -> list[int]:
        return torch.randint(0, 1000, (length,), generator=self.random).tolist()

    def request(self, name: str, tokens: list[int]) -> SimpleNamespace:
        """Insert a prompt; the request has the slots that the tree has for it."""
        key = RadixKey(array("q", tokens))
        own = self.slots[self.used : self.used + len(tokens)]
        self.used += len(tokens)
        self.cache.insert(InsertParams(key=key, value=own))
        node = last = self.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
        slots = []
        while node.parent is not None:
            slots.append(node.value)
            node = node.parent
        return SimpleNamespace(rid=name, last_node=last, row=torch.cat(slots[::-1]))


def table_of(requests: list[Any], more: int) -> torch.Tensor:
    """Rows of slots, each with some of its own behind the tree's."""
    table = torch.full((len(requests), max(len(r.row) for r in requests) + more), -1, dtype=torch.int32)
    for index, request in enumerate(requests):
        table[index, : len(request.row)] = request.row
        table[index, len(request.row) : len(request.row) + more] = 30000 + index * more + torch.arange(more)
    return table


def requests_of_three_levels(tree: Tree) -> list[Any]:
    tree.system, groups = tree.text(300), [tree.text(100), tree.text(150)]
    return [tree.request(str(i), [*tree.system, *groups[i % 2], *tree.text(7 + i)]) for i in (0, 1, 2, 3, 4)]


def expected(shared: SharedPrefixes, requests: list[Any], cache: Any, q_lens: list[int]) -> Any:
    batch = SimpleNamespace(reqs=requests, tree_cache=cache)
    forward_batch = SimpleNamespace(rids=[r.rid for r in requests])
    shared.expect(batch, forward_batch)
    paths = shared.take(forward_batch, len(requests))
    assert paths is not None
    kv_lens = torch.tensor([len(r.row) for r in requests]).int() + 5
    qo_indptr = torch.tensor([0, *q_lens]).cumsum(0).int()
    limits = torch.minimum(
        shareable(qo_indptr.diff(), kv_lens, 1, 2, 128), torch.tensor([len(r.row) for r in requests]).int()
    )
    rows = torch.arange(len(requests))
    oracle = PrefixForest.from_token_table(table_of(requests, 5), rows, limits, 1)
    return shared.forest(paths, qo_indptr, kv_lens, **TILES), oracle


def assert_equal(found: PrefixForest, oracle: PrefixForest) -> None:
    assert found.nodes.tolist() == oracle.nodes.tolist()
    assert found.members.tolist() == oracle.members.tolist()


@pytest.mark.parametrize(
    ("q_lens", "nodes"), [((1, 1, 1, 1, 1), 3), ((1, 5, 1, 1, 3), 3), ((1, 70, 1, 1, 1), 2)]
)
def test_paths_give_the_forest_of_the_rows(q_lens: tuple[int, ...], nodes: int) -> None:
    tree = Tree()
    requests = requests_of_three_levels(tree)
    found, oracle = expected(SharedPrefixes(), requests, tree.cache, list(q_lens))
    assert_equal(found, oracle)
    assert found.num_nodes == nodes


def test_requests_without_a_place_in_the_tree_share_nothing() -> None:
    tree = Tree()
    requests = requests_of_three_levels(tree)
    requests[2].last_node, requests[2].row = None, requests[2].row[:0]
    requests[4].last_node, requests[4].row = tree.cache.root_node, requests[4].row[:0]
    found, oracle = expected(SharedPrefixes(), requests, tree.cache, [1] * 5)
    assert_equal(found, oracle)
    assert found.num_nodes == 2


def test_paths_are_read_when_the_batch_changes() -> None:
    tree, paths = Tree(), RadixPaths()
    requests = requests_of_three_levels(tree)
    first = paths.of_batch(requests, tree.cache)
    assert paths.of_batch(list(requests), tree.cache) is first
    assert paths.of_batch(requests[:4], tree.cache) is not first
    before = paths.of_batch(requests, tree.cache)
    requests[0] = SimpleNamespace(rid="another", last_node=requests[0].last_node)
    assert paths.of_batch(requests, tree.cache) is not before, "a node's name may be used again"
    requests[0].last_node = requests[1].last_node
    assert paths.of_batch(requests, tree.cache)[0] == paths.of_batch(requests, tree.cache)[1]
    assert paths.reads == 5


def test_a_forest_is_made_once_while_requests_decode() -> None:
    tree, shared = Tree(), SharedPrefixes()
    requests = requests_of_three_levels(tree)
    found, _ = expected(shared, requests, tree.cache, [1] * 5)
    again, _ = expected(shared, requests, tree.cache, [1] * 5)
    assert again is found
    changed, oracle = expected(shared, requests, tree.cache, [1, 70, 1, 1, 1])
    assert_equal(changed, oracle)


def test_a_node_that_is_split_meanwhile() -> None:
    """The batch has not changed and its paths are not read again: they are shorter in nodes, and right."""
    tree, shared = Tree(), SharedPrefixes()
    requests = requests_of_three_levels(tree)
    found, oracle = expected(shared, requests, tree.cache, [1] * 5)
    newcomer = tree.request("new", [*tree.system[:120], *tree.text(50)])
    again, oracle = expected(shared, requests, tree.cache, [1] * 5)
    assert again is found
    assert_equal(again, oracle)
    together, oracle = expected(shared, [newcomer, *requests], tree.cache, [1] * 6)
    assert_equal(together, oracle)
    assert together.num_nodes == 4


def info(*nodes: tuple[int, int, int, int | None]) -> tuple[SimpleNamespace, ...]:
    names = ("node_id", "path_start", "path_end", "full_value_len")
    return tuple(SimpleNamespace(**dict(zip(names, node, strict=True))) for node in nodes)


def test_a_tree_that_answers_by_the_ids_of_nodes() -> None:
    """0.5.23, whose nodes may live in Rust: one question for all; nodes whose slots are gone end a path."""
    answers = {
        7: info((3, 0, 64, 64), (7, 64, 96, 32)),
        9: info((3, 0, 64, 64), (8, 64, 80, None), (9, 80, 96, 16)),
    }
    asked = []

    def collect(nodes: Any) -> Any:
        asked.append(list(nodes))
        return tuple(answers[node] for node in nodes)

    wrapped = SimpleNamespace(inner=SimpleNamespace(tree_core=SimpleNamespace(collect_path_info=collect)))
    requests = [SimpleNamespace(rid=str(i), last_node=node) for i, node in enumerate((7, 9, None, 7))]
    paths = RadixPaths().of_batch(requests, wrapped)
    assert paths == [((3, 64), (7, 96)), ((3, 64),), (), ((3, 64), (7, 96))]
    assert asked == [[7, 9]]


def test_a_cache_of_another_kind_is_read_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    shared = SharedPrefixes()
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="1", last_node=5)], tree_cache=object())
    forward_batch = SimpleNamespace(rids=["1"])
    with caplog.at_level(logging.WARNING, logger="sglang.srt.plugins.fi_backend"):
        for _ in range(3):
            shared.expect(batch, forward_batch)
            assert shared.take(forward_batch, 1) is None
    assert len(caplog.records) == 1


def test_paths_belong_to_one_step() -> None:
    tree, shared = Tree(), SharedPrefixes()
    requests = requests_of_three_levels(tree)
    forward_batch = SimpleNamespace(rids=[r.rid for r in requests])
    batch = SimpleNamespace(reqs=requests, tree_cache=tree.cache)
    for step, expected_paths in (
        (SimpleNamespace(rids=forward_batch.rids), 5),  # a copy of the forward batch
        (SimpleNamespace(), 5),  # a graph's view of it
        (SimpleNamespace(rids=list(forward_batch.rids)), None),
        (SimpleNamespace(rids=None), None),
    ):
        shared.expect(batch, forward_batch)
        paths = shared.take(step, 5)
        assert (None if paths is None else len(paths)) == expected_paths
        assert shared.take(step, 5) is None, "taken once"
    shared.expect(batch, forward_batch)
    assert shared.take(SimpleNamespace(), 4) is None, "another number of requests"


class Node:
    def __init__(self, name: int, parent: Node | None, length: int) -> None:
        self.id, self.parent, self.key = name, parent, range(length)


LONG = Shape(page_size=16, windows=(-1, 40), width=2048, slots=8192)


def served(graph: bool, **server: Any) -> Engine:
    """Three requests of two levels decode; their first 512 tokens are the same, and two share 512 more."""
    engine = Engine(LONG, max_prefill_tokens=4096, **server)
    root = Node(0, None, 0)
    system = Node(1, root, 512)
    group = Node(2, system, 512)

    def step(mode: ForwardMode, lengths: tuple[int, ...]) -> SimpleNamespace:
        batch = engine.step(mode, lengths)
        nodes = (group, group, system)
        active = [index for index, length in enumerate(lengths) if length]
        batch.rids = [str(index) for index in active]
        requests = [SimpleNamespace(rid=str(i), last_node=nodes[i]) for i in active]
        cache = SimpleNamespace(resolve_node_handle=lambda node: node)
        runner = SimpleNamespace(attn_backend=engine.backend)
        compat._tell_batch(batch, None, SimpleNamespace(reqs=requests, tree_cache=cache), runner)
        return batch

    def eager(mode: ForwardMode, lengths: tuple[int, ...]) -> None:
        batch = step(mode, lengths)
        engine.backend.init_forward_metadata(batch)
        for layer in engine.layers:
            engine.check_layer(layer, batch)

    eager(ForwardMode.EXTEND, (1030, 0, 0))
    engine.share(1, 0, 1024)
    engine.share(2, 0, 512)
    eager(ForwardMode.EXTEND, (0, 40, 3))
    if graph:
        replayed = Graph(engine, ForwardMode.DECODE)
        for _ in range(3):
            replayed.replay(step(ForwardMode.DECODE, (1, 1, 1)))
    else:
        for _ in range(3):
            eager(ForwardMode.DECODE, (1, 1, 1))
        eager(ForwardMode.MIXED, (1, 200, 1))
    return engine


@pytest.mark.parametrize("graph", [False, True])
def test_prefixes_are_read_once(graph: bool) -> None:
    before = counters().snapshot()
    served(graph)
    after = counters().snapshot()
    # Two requests do not read the first 512 tokens again, and one of them not the next 512, in three steps;
    # in the mixed step, one of the two that decode. The layer with a window reads for each request.
    mixed = 0 if graph else 512
    assert after.kv_tokens_saved - before.kv_tokens_saved == 3 * (2 * 512 + 512) + mixed
    assert after.shared_plans - before.shared_plans == 3 + (not graph)


@pytest.mark.parametrize(
    "server", [{"disable_radix_cache": True}, {"enable_deterministic_inference": True}], ids=str
)
def test_where_nothing_is_shared(server: dict[str, Any]) -> None:
    before = counters().snapshot()
    served(graph=False, **server)
    assert counters().snapshot().kv_tokens_saved == before.kv_tokens_saved


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "sharing")
    before = counters().snapshot()
    served(graph=False)
    assert counters().snapshot().kv_tokens_saved == before.kv_tokens_saved
