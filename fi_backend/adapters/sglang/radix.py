# SPDX-License-Identifier: Apache-2.0
"""Where the requests of a batch stand in SGLang's radix tree: which of their KV slots are the same.

A request's path is read from its `last_node`. SGLang moves that node and rewrites the request's row of the
token table in one call of its scheduler, and keeps the path locked while the request runs. So the row begins
with the slots of the path's nodes, always; a path that was read before a node was split is shorter in nodes,
never wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from fi_backend.core.prefix_forest import PrefixForest, shareable

_log = logging.getLogger("sglang.srt.plugins.fi_backend")
# (node, depth in KV tokens at which it ends) of a request, from the root on.
Path = tuple[tuple[Any, int], ...]
_NO_PATH: Final[Path] = ()


class RadixPaths:
    """The paths of a batch, read anew only when a request or a `last_node` of it has changed."""

    def __init__(self) -> None:
        self._of: tuple[list[str], list[Any]] = ([], [])
        self._paths: list[Path] = []
        self.reads = 0

    def of_batch(self, requests: Sequence[Any], cache: Any) -> list[Path]:
        """Return the path of each request; the same list as long as nothing has changed.

        requests: SGLang's Req, of which rid and last_node are read; cache: its tree cache.
        """
        # Ids of nodes may be used again: a node is held by its request, so the requests are compared too.
        batch = [request.rid for request in requests], [request.last_node for request in requests]
        if batch != self._of:
            self._paths = _read(batch[1], cache)
            self._of = batch
            self.reads += 1
        return self._paths


def _read(nodes: list[Any], cache: Any) -> list[Path]:
    tree = getattr(cache, "inner", cache)  # sessions wrap the cache that has the tree
    wanted = list(dict.fromkeys(node for node in nodes if node is not None))
    core = getattr(tree, "tree_core", None)
    if core is not None and hasattr(core, "collect_path_info"):  # 0.5.23, with nodes in Python or in Rust
        found = [_path_of_info(path) for path in core.collect_path_info(wanted)] if wanted else []
    else:
        found = [_path_of_node(tree.resolve_node_handle(node)) for node in wanted]
    paths = dict(zip(wanted, found, strict=True))
    return [_NO_PATH if node is None else paths[node] for node in nodes]


def _path_of_info(path: Sequence[Any]) -> Path:
    steps = []
    for node in path:
        if node.full_value_len != node.path_end - node.path_start:
            break  # its slots are not on the device
        steps.append((node.node_id, node.path_end))
    return tuple(steps)


def _path_of_node(node: Any) -> Path:
    """Walk up to the root, which has no parent."""
    chain = []
    while node is not None and node.parent is not None:
        chain.append(node)
        node = node.parent
    steps, end = [], 0
    for each in reversed(chain):
        end += len(each.key)
        steps.append((each.id, end))
    return tuple(steps)


class SharedPrefixes:
    """The paths of the batch whose step comes next, and the forests that they give."""

    def __init__(self) -> None:
        self._radix = RadixPaths()
        self._waiting: tuple[Any, list[Path]] | None = None
        self._warned = False
        self._depths: tuple[list[Path], Tensor] = [], torch.zeros(0, dtype=torch.int32, device="cpu")
        self._known: dict[tuple[int, int], tuple[list[Path], Tensor, PrefixForest]] = {}

    def expect(self, batch: Any, forward_batch: Any) -> None:
        """Read the paths of a batch that SGLang has just turned into a forward batch.

        The two meet again by the list of request ids, which every copy of the forward batch carries.
        """
        self._waiting = None
        try:
            self._waiting = forward_batch.rids, self._radix.of_batch(batch.reqs, batch.tree_cache)
        except Exception as error:  # noqa: BLE001 - a cache of another kind; requests can be read one by one
            if not self._warned:
                _log.warning("shared prefixes are not read once: no paths in the radix cache: %r", error)
            self._warned = True

    def take(self, forward_batch: Any, requests: int) -> list[Path] | None:
        """Return the paths of a step that was expected, once; None for any other.

        requests: without the padding of a graph, whose view carries no ids.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None or len(waiting[1]) != requests:
            return None
        rids = getattr(forward_batch, "rids", waiting[0])
        return waiting[1] if rids is waiting[0] else None

    def forest(
        self,
        paths: list[Path],
        qo_indptr: Tensor,
        kv_lens: Tensor,
        *,
        page_size: int,
        group: int,
        max_tile: int,
    ) -> PrefixForest:
        """Return what the requests of a step share, for attention with these tiles; see shareable().

        qo_indptr: host int32 [requests + 1]; kv_lens: host int32 [requests], exact. Requests past the paths
        are padding and share nothing.
        """
        if paths is not self._depths[0]:
            ends = [path[-1][1] if path else 0 for path in paths]
            self._depths = paths, torch.tensor(ends, dtype=torch.int32, device="cpu")
        limits = shareable(qo_indptr.diff(), kv_lens, page_size, group, max_tile)
        limits[len(paths) :] = 0
        torch.minimum(limits[: len(paths)], self._depths[1], out=limits[: len(paths)])
        known = self._known.get((group, max_tile))
        # While requests decode, nothing changes but their lengths, and these lie behind the paths.
        if known is not None and known[0] is paths and torch.equal(known[1], limits):
            return known[2]
        padded = [*paths, *[_NO_PATH] * (limits.shape[0] - len(paths))]
        forest = PrefixForest.from_paths(padded, limits)
        self._known[group, max_tile] = paths, limits, forest
        return forest
