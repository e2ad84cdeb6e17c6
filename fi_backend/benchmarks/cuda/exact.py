# SPDX-License-Identifier: Apache-2.0
"""Attention in float64 for a sample of rows: what every measured implementation is held against."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from fi_backend.benchmarks.peers import Problem
from fi_backend.benchmarks.variant_oracles import Arguments, Oracle, Request

_REQUESTS = 12
_TOKENS = 16
# First, last and beside the edges of the query tiles that kernels use.
_TILE_EDGES = (0, 1, 15, 16, 63, 64, 127, 128)


@dataclass(frozen=True)
class Sample:
    """rows: int64 [n], query tokens of the step, all their heads. exact: float64 [n, num_qo_heads, dim]."""

    rows: Tensor
    exact: Tensor

    @property
    def rms(self) -> float:
        """Root mean square of the exact elements."""
        return float(self.exact.square().mean().sqrt())


@dataclass(frozen=True)
class Errors:
    """Largest and root-mean-square difference from float64; infinite if any element of the output is NaN."""

    largest: float
    rms: float


def sample_problem(
    problem: Problem, layer: int, variant: tuple[Oracle, Arguments] | None = None, *, seed: int = 0
) -> Sample:
    """Compute a sample of one layer's rows, plain or of a variant of attention with its arguments.

    The longest, shortest, first and last request are in it and others at random; of each its first and last
    query token, those at tile edges and others at random.
    """
    lens = problem.kv_lens.tolist()
    starts = problem.qo_indptr.tolist()
    chosen = random.Random(seed)
    requests = {lens.index(max(lens)), lens.index(min(lens)), 0, len(lens) - 1}
    requests |= set(chosen.sample(range(len(lens)), min(len(lens), _REQUESTS - len(requests))))
    rows: list[int] = []
    parts: list[Tensor] = []
    for request in sorted(requests):
        q_len = starts[request + 1] - starts[request]
        tokens = {token for token in _TILE_EDGES if token < q_len} | {q_len - 1}
        tokens |= set(chosen.sample(range(q_len), max(0, min(q_len, _TOKENS - len(tokens)))))
        ordered = sorted(tokens)
        rows += [starts[request] + token for token in ordered]
        visible = [lens[request] - q_len + token + 1 for token in ordered]
        chosen_rows, kv_len = rows[-len(ordered) :], lens[request]
        if variant is None:
            parts.append(_exact(problem, layer, request, chosen_rows, visible, kv_len))
        else:
            oracle, arguments = variant
            asked = _request(problem, layer, request, chosen_rows, visible, kv_len)
            parts.append(oracle.attention(asked, arguments)[0])
    return Sample(torch.tensor(rows, device=problem.q.device), torch.cat(parts))


def errors(output: Tensor, sample: Sample) -> Errors:
    """Hold an output [tokens, num_qo_heads, dim] against the sample of its rows."""
    difference = (output[sample.rows].double() - sample.exact).abs()
    if bool(output.isnan().any()) or not bool(difference.isfinite().all()):
        return Errors(math.inf, math.inf)
    return Errors(float(difference.max()), float(difference.square().mean().sqrt()))


def _exact(
    problem: Problem, layer: int, request: int, rows: list[int], visible: list[int], kv_len: int
) -> Tensor:
    """Return float64 [rows, num_qo_heads, dim]; row i sees the first visible[i] keys."""
    spec = problem.spec
    key, value = (each.transpose(0, 1) for each in _cached(problem, layer, request, kv_len))
    n = len(rows)
    q = problem.q[rows].double().view(n, spec.num_kv_heads, spec.group_size, spec.head_dim)
    logits = q.permute(1, 0, 2, 3).reshape(spec.num_kv_heads, -1, spec.head_dim) @ key.transpose(1, 2)
    logits = logits.view(spec.num_kv_heads, n, spec.group_size, kv_len) * spec.scale
    hidden = torch.arange(kv_len, device=q.device) >= torch.tensor(visible, device=q.device)[:, None]
    weights = logits.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    out = weights.reshape(spec.num_kv_heads, -1, kv_len) @ value
    return (
        out.view(spec.num_kv_heads, n, spec.group_size, -1)
        .permute(1, 0, 2, 3)
        .reshape(n, spec.num_qo_heads, -1)
    )


def _request(
    problem: Problem, layer: int, request: int, rows: list[int], visible: list[int], kv_len: int
) -> Request:
    """Return the same rows as oracles of variants take them."""
    spec, device = problem.spec, problem.q.device
    group = spec.group_size
    key, value = (each.repeat_interleave(group, 1) for each in _cached(problem, layer, request, kv_len))
    tokens = torch.tensor(rows, device=device)
    return Request(
        q=problem.q[tokens].double(),
        k=key,
        v=value,
        q_pos=torch.tensor(visible, device=device) - 1,
        kv_pos=torch.arange(kv_len, device=device),
        scale=spec.scale,
        index=request,
        tokens=tokens,
    )


def _cached(problem: Problem, layer: int, request: int, kv_len: int) -> tuple[Tensor, Tensor]:
    """Return K and V of a request in order, float64 [kv_len, num_kv_heads, dim]."""
    spec = problem.spec
    pages = problem.block_table[request, : -(-kv_len // spec.page_size)].long()
    key, value = (
        _rows(cache, pages).view(-1, spec.num_kv_heads, cache.shape[-1])[:kv_len].double()
        for cache in problem.layers[layer]
    )
    return key, value


def _rows(cache: Tensor, pages: Tensor) -> Tensor:
    """Return cache[pages] in float32, which holds every value; fp8 cannot be indexed everywhere."""
    if cache.dtype.itemsize == 1:
        return cache.view(torch.uint8)[pages].view(cache.dtype).float()
    return cache[pages].float()
