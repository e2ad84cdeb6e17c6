# SPDX-License-Identifier: Apache-2.0
"""What a measured implementation is given, and what it has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fi_backend.core.spec import AttentionSpec


@dataclass(frozen=True)
class SharedPrefix:
    """The requests first .. last - 1 begin with the same pages, which hold `tokens` tokens."""

    tokens: int
    first: int
    last: int


@dataclass(frozen=True)
class Problem:
    """One workload with its tensors; causal attention.

    q: [tokens, num_qo_heads, head_dim]. layers: K and V of each layer, [pages, page_size, num_kv_heads,
    head_dim]. qo_indptr: int32 [requests + 1]. kv_lens: int32 [requests]. block_table: int32 [requests, pages
    of the longest]. All on one device. prefixes: what requests share; one request belongs to one at most.
    """

    spec: AttentionSpec
    q: Tensor
    layers: list[tuple[Tensor, Tensor]]
    qo_indptr: Tensor
    kv_lens: Tensor
    block_table: Tensor
    prefixes: tuple[SharedPrefix, ...] = ()


Run = Callable[[int], Tensor]


class Peer(ABC):
    """Another implementation of attention, to be measured beside ours on the same numbers.

    mark: what it takes in another form than the problem has it, such as queries of fewer bits. A peer with a
    mark is shown with it, and is never the best.
    """

    name: ClassVar[str]
    mark: ClassVar[str] = ""

    @abstractmethod
    def unavailable(self) -> str | None:
        """Return why it cannot run here, for example what is not installed, or None."""

    @abstractmethod
    def prepare(self, problem: Problem) -> Run:
        """Do everything that a serving engine does once a step or once a cache, and return the layer's call.

        The call takes the index of a layer and returns [tokens, num_qo_heads, head_dim], always the same
        tensor if it likes.
        Raises UnsupportedError for a problem that the implementation cannot take.
        """
