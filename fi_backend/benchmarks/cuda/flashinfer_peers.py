# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's wrappers as benchmark peers."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fi_backend.benchmarks.cuda.fa3 import own_begins
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.errors import UnsupportedError

_WORKSPACE_BYTES = 512 << 20
# From this many query heads on one KV head its documentation advises tensor cores for decode.
_TENSOR_CORE_GROUP = 4


class _FlashInfer(Peer):
    def unavailable(self) -> str | None:
        """Return what is missing, or None."""
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer-python is not installed"
        try:
            import flashinfer  # noqa: F401
        except (ImportError, OSError, RuntimeError) as error:
            return f"flashinfer cannot be imported ({error})"
        return None

    def prepare(self, problem: Problem) -> Run:
        """Plan the step with host copies, as engines do."""
        if problem.spec.batch_invariant:
            raise UnsupportedError("it does not promise answers that are independent of the batch")
        return self._plan(problem)

    @abstractmethod
    def _plan(self, problem: Problem) -> Run:
        """Plan and return the layer's call."""


class Decode(_FlashInfer):
    """The decode wrapper."""

    name = "flashinfer-decode"

    def _plan(self, problem: Problem) -> Run:
        import flashinfer

        spec = problem.spec
        if problem.q.shape[0] != problem.kv_lens.shape[0]:
            raise UnsupportedError("more than one query token of a request")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(problem.q.device),
            "NHD",
            use_tensor_cores=spec.group_size >= _TENSOR_CORE_GROUP,
            backend="fa2",
        )
        indptr, indices, last = page_lists(problem)
        wrapper.plan(indptr.cpu(), indices, last.cpu(), *_heads(problem), **_dtypes(problem))
        return _writing(problem, wrapper)


class Fa2(_FlashInfer):
    """The prefill wrapper with the template for all GPUs."""

    name = "flashinfer-fa2"
    _backend = "fa2"

    def _plan(self, problem: Problem) -> Run:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(problem.q.device), "NHD", backend=self._backend
        )
        indptr, indices, last = page_lists(problem)
        host = (problem.qo_indptr.cpu(), indptr.cpu(), indices, last.cpu())
        wrapper.plan(*host, *_heads(problem), causal=True, **_dtypes(problem))
        return _writing(problem, wrapper)


class Fa3(Fa2):
    """The prefill wrapper with the template for Hopper."""

    name = "flashinfer-fa3"
    _backend = "fa3"

    def _plan(self, problem: Problem) -> Run:
        if problem.spec.kv_dtype != problem.spec.dtype:
            raise UnsupportedError("queries and cache of different dtypes")
        return super()._plan(problem)


class Persistent(_FlashInfer):
    """`BatchAttention`, one persistent kernel for all lengths."""

    name = "flashinfer-batch"

    def _plan(self, problem: Problem) -> Run:
        import flashinfer

        spec = problem.spec
        if spec.kv_dtype != spec.dtype:
            raise UnsupportedError("queries and cache of different dtypes")
        wrapper = flashinfer.BatchAttention("NHD")
        indptr, indices, _ = page_lists(problem)
        wrapper.plan(
            *(problem.qo_indptr, indptr, indices, problem.kv_lens, spec.num_qo_heads, spec.num_kv_heads),
            *(spec.head_dim, spec.head_dim_v, spec.page_size),
            causal=True,
            **_dtypes(problem),
        )
        out = torch.empty_like(problem.q)
        lse = torch.empty(problem.q.shape[:2], dtype=torch.float32, device=problem.q.device)

        def run(layer: int) -> Tensor:
            wrapper.run(problem.q, problem.layers[layer], out=out, lse=lse)
            return out

        return run


class Cascade(_FlashInfer):
    """The wrapper for prefixes that the caller names."""

    name = "flashinfer-cascade"

    def _plan(self, problem: Problem) -> Run:
        import flashinfer

        if not problem.prefixes:
            raise UnsupportedError("no request shares a prefix")
        device, page_size = problem.q.device, problem.spec.page_size
        begins = own_begins(problem.prefixes, problem.kv_lens.shape[0])
        indptr, indices, last = page_lists(problem)
        bounds = list(pairwise(indptr.tolist()))
        shared = [indices[bounds[each.first][0] :][: each.tokens // page_size] for each in problem.prefixes]
        own = [
            indices[low + begin // page_size : high]
            for (low, high), begin in zip(bounds, begins, strict=True)
        ]

        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        def starts(parts: Sequence[Tensor]) -> Tensor:
            return vector([0, *(part.numel() for part in parts)]).cumsum(0, dtype=torch.int32)

        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, _workspace(device), "NHD")
        wrapper.plan(
            [problem.qo_indptr[[0, *(each.last for each in problem.prefixes)]], problem.qo_indptr],
            [starts(shared), starts(own)],
            [torch.cat(shared), torch.cat(own)],
            [vector([page_size] * len(shared)), last],
            *_heads(problem),
            causal=True,
            **_dtypes(problem),
        )
        return lambda layer: wrapper.run(problem.q, problem.layers[layer])


def page_lists(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 indptr [requests + 1], page indices and the tokens on each request's last page."""
    page_size, lens = problem.spec.page_size, problem.kv_lens
    counts = (lens + page_size - 1) // page_size
    indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    indptr[1:] = counts.cumsum(0)
    columns = torch.arange(problem.block_table.shape[1], device=lens.device)
    indices = problem.block_table[columns < counts[:, None]]
    return indptr, indices, lens - (counts - 1) * page_size


def _heads(problem: Problem) -> tuple[int, int, int, int]:
    spec = problem.spec
    return spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size


def _dtypes(problem: Problem) -> dict[str, torch.dtype]:
    return {
        "q_data_type": getattr(torch, problem.spec.dtype),
        "kv_data_type": getattr(torch, problem.spec.kv_dtype),
    }


def _writing(problem: Problem, wrapper: Any) -> Run:
    out = torch.empty_like(problem.q)

    def run(layer: int) -> Tensor:
        wrapper.run(problem.q, problem.layers[layer], out=out)
        return out

    return run


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def fi_backend_benchmark_peers(device: str) -> Sequence[Peer]:
    """Offer the wrappers on CUDA devices."""
    return [Decode(), Fa2(), Fa3(), Persistent(), Cascade()] if device == "cuda" else []
