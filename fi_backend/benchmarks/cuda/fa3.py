# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 as vLLM ships it: plain, with a single split, called twice as a cascade, beside fp8."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fi_backend.benchmarks.peers import Peer, Problem, Run, SharedPrefix
from fi_backend.errors import UnsupportedError

_LIBRARY = Path("vllm_flash_attn") / "_vllm_fa3_C.abi3.so"
_library: Path | None = None


def use_library(path: Path) -> None:
    """Take FlashAttention 3 from this file instead of the installed vLLM."""
    global _library
    _library = path


class _Fa3(Peer):
    def unavailable(self) -> str | None:
        """Return what is missing, or None."""
        if torch.cuda.get_device_capability() != (9, 0):
            return "FlashAttention 3 runs on compute capability 9.0 alone"
        if hasattr(torch.ops._vllm_fa3_C, "fwd"):
            return None
        path = _library or _installed()
        if path is None:
            return f"vllm with {_LIBRARY} is not installed; or name the file with --fa3-library"
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"{path} cannot be loaded ({error})"
        return None


class Fa3(_Fa3):
    """One call with the kernel's own schedule."""

    name = "fa3"

    def prepare(self, problem: Problem) -> Run:
        """Schedule the step."""
        _expect_paged_bf16(problem)
        if problem.spec.batch_invariant:
            raise UnsupportedError("its splits depend on the batch")
        return _plain(problem, num_splits=0)


class Fa3OneSplit(_Fa3):
    """One call without splits along KV: what makes it independent of the batch."""

    name = "fa3-1split"

    def prepare(self, problem: Problem) -> Run:
        """Schedule the step."""
        _expect_paged_bf16(problem)
        if not problem.spec.batch_invariant:
            raise UnsupportedError("measured where the answer may not depend on the batch")
        return _plain(problem, num_splits=1)


class Fa3Cascade(_Fa3):
    """Prefixes as one call, what follows them as another, merged by a small kernel."""

    name = "fa3-cascade"

    def prepare(self, problem: Problem) -> Run:
        """Split the block table at the prefixes and schedule both calls."""
        from fi_backend.benchmarks.cuda.merge_triton import merge

        _expect_paged_bf16(problem)
        if not problem.prefixes:
            raise UnsupportedError("no request shares a prefix")
        device, requests = problem.q.device, problem.kv_lens.shape[0]
        own_from = own_begins(problem.prefixes, requests)

        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        upper = _Call(
            problem,
            qo_indptr=problem.qo_indptr[[0, *(prefix.last for prefix in problem.prefixes)]],
            kv_lens=vector([prefix.tokens for prefix in problem.prefixes]),
            block_table=problem.block_table[[prefix.first for prefix in problem.prefixes]].contiguous(),
            causal=False,
        )
        pages = [begin // problem.spec.page_size for begin in own_from]
        width = problem.block_table.shape[1]
        tails = torch.zeros(requests, width - min(pages), dtype=torch.int32, device=device)
        for row, tail, begin in zip(problem.block_table, tails, pages, strict=True):
            tail[: width - begin] = row[begin:]
        lower = _Call(
            problem,
            qo_indptr=problem.qo_indptr,
            kv_lens=problem.kv_lens - vector(own_from),
            block_table=tails,
            causal=True,
        )
        out = torch.empty_like(problem.q)

        def run(layer: int) -> Tensor:
            shared, shared_lse = upper(layer)
            own, own_lse = lower(layer)
            merge(shared, shared_lse, own, own_lse, out)
            return out

        return run


class Fa3Fp8Queries(_Fa3):
    """What it has for fp8 caches: queries of the same dtype, and products of fp8."""

    name = "fa3-fp8-queries"
    mark = "queries and weights rounded to fp8"

    def prepare(self, problem: Problem) -> Run:
        """Round the queries and schedule the step."""
        _expect_e4m3_cache(problem)
        return _plain(replace(problem, q=problem.q.to(torch.float8_e4m3fn)), num_splits=0)


class Fa3WideCache(_Fa3):
    """The same numbers in a cache of the queries' dtype, with twice the bytes."""

    name = "fa3-wide-cache"
    mark = "the fp8 cache expanded to 16 bits beforehand"

    def prepare(self, problem: Problem) -> Run:
        """Expand the caches and schedule the step."""
        _expect_e4m3_cache(problem)
        dtype = problem.q.dtype
        layers = [(key.to(dtype), value.to(dtype)) for key, value in problem.layers]
        return _plain(replace(problem, layers=layers), num_splits=0)


def own_begins(prefixes: Sequence[SharedPrefix], requests: int) -> list[int]:
    """Return the number of shared tokens of each request.

    Raises UnsupportedError unless the prefixes cover all requests in order, as one call needs them.
    """
    begins: list[int] = []
    for prefix in prefixes:
        if prefix.first != len(begins):
            break
        begins += [prefix.tokens] * (prefix.last - prefix.first)
    if len(begins) != requests:
        raise UnsupportedError("the prefixes do not cover the requests in order")
    return begins


def _plain(problem: Problem, *, num_splits: int) -> Run:
    call = _Call(
        problem,
        qo_indptr=problem.qo_indptr,
        kv_lens=problem.kv_lens,
        block_table=problem.block_table,
        causal=True,
        num_splits=num_splits,
    )
    return lambda layer: call(layer)[0]


class _Call:
    """One scheduled call over paged KV; returns output and log-sum-exp [heads, tokens]."""

    def __init__(
        self,
        problem: Problem,
        *,
        qo_indptr: Tensor,
        kv_lens: Tensor,
        block_table: Tensor,
        causal: bool,
        num_splits: int = 0,
    ) -> None:
        self._problem, self._splits, self._causal = problem, num_splits, causal
        self._qo_indptr, self._kv_lens, self._table = qo_indptr, kv_lens, block_table
        self._max_q, self._max_k = int(qo_indptr.diff().max()), int(kv_lens.max())
        spec = problem.spec
        # Of fp8 queries, too, the output has 16 bits.
        shape = (*problem.q.shape[:2], spec.head_dim_v)
        self._out = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=problem.q.device)
        # Positional: the operators' argument names are not part of what vLLM promises.
        self._schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            *(kv_lens.shape[0], self._max_q, self._max_k, spec.num_qo_heads, spec.num_kv_heads),
            *(spec.head_dim, spec.head_dim_v, problem.q.dtype, kv_lens, qo_indptr),
            *(None, None, None, None),  # lengths of new keys, used queries, padding on the left
            *(spec.page_size, 0, causal, -1, -1),  # new keys at most; window to the left and right
            *(False, num_splits, None, 0),  # soft cap, splits, packing of groups, spare SMs
        )

    def __call__(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self._problem.layers[layer]
        out, lse, *_ = torch.ops._vllm_fa3_C.fwd(
            *(self._problem.q, key, value, None, None, None, self._out, self._qo_indptr),
            *(None, None, None, self._kv_lens, self._max_q, self._max_k, self._table),
            *(None, None, None, None, None, None, None, None),  # batch map, rotary, scales of fp8
            *(self._problem.spec.scale, self._causal, -1, -1, 0.0, True, self._schedule),
            *(self._splits, None, 0, None, 1, 0, None),  # packing, spare SMs, sinks, context parallelism
        )
        return out, lse


def _expect_paged_bf16(problem: Problem) -> None:
    if problem.spec.kv_dtype != problem.spec.dtype:
        raise UnsupportedError("queries and cache of different dtypes")


def _expect_e4m3_cache(problem: Problem) -> None:
    if problem.spec.kv_dtype != "float8_e4m3fn":
        raise UnsupportedError("measured where the cache is e4m3")
    if problem.spec.batch_invariant:
        raise UnsupportedError("its splits depend on the batch")


def _installed() -> Path | None:
    spec: Any = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _LIBRARY).is_file():
            return path
    return None


def fi_backend_benchmark_peers(device: str) -> Sequence[Peer]:
    """Offer the ways to call it on CUDA devices."""
    ways = (Fa3, Fa3OneSplit, Fa3Cascade, Fa3Fp8Queries, Fa3WideCache)
    return [way() for way in ways] if device == "cuda" else []
