# SPDX-License-Identifier: Apache-2.0
"""The workloads of `bench kernels --device cuda` and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fi_backend.benchmarks.peers import Problem, SharedPrefix
from fi_backend.benchmarks.workloads import Workload
from fi_backend.core.spec import AttentionSpec

_MIN_LAYERS = 4
_SPEC = AttentionSpec(32, 8, 128, dtype="bfloat16", page_size=16)


@dataclass(frozen=True)
class Case:
    """A row of the result.

    variants: other ways of ours to measure beside it, of `ours.VARIANTS`, or shipped variants of attention by
    name, which compute something else.
    """

    workload: Workload
    spec: AttentionSpec = _SPEC
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The row's name."""
        return self.workload.name


def zipf_lengths(count: int, mean: int, *, exponent: float = 1.2, seed: int = 0) -> tuple[int, ...]:
    """Return lengths of the given mean that fall with rank ** -exponent, in random order."""
    weights = torch.arange(1, count + 1, dtype=torch.float64) ** -exponent
    lengths = weights / weights.mean() * mean
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return tuple(max(1, int(length)) for length in lengths[order])


def uniform_lengths(count: int, low: int, high: int, *, seed: int = 0) -> tuple[int, ...]:
    """Return lengths drawn from low .. high."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())


def _decode(name: str, kv_lens: Sequence[int], *prefixes: SharedPrefix) -> Workload:
    return Workload(name, (1,) * len(kv_lens), tuple(kv_lens), prefixes)


def _prefill(name: str, lengths: Sequence[int]) -> Workload:
    return Workload(name, tuple(lengths), tuple(lengths))


def _groups(count: int, size: int, tokens: int) -> tuple[SharedPrefix, ...]:
    return tuple(SharedPrefix(tokens, i * size, (i + 1) * size) for i in range(count))


def cases() -> list[Case]:
    """Return all rows in the order of the result."""
    zipf16 = zipf_lengths(16, 1024)
    long_decode = _decode("dec_const_64x4k", [4096] * 64)
    skewed = _decode("dec_zipf_128xmean2k", zipf_lengths(128, 2048))
    mixed = Workload("mixed_2k+64dec4k", (2048,) + (1,) * 64, (8192,) + (4096,) * 64)
    invariant = replace(_SPEC, batch_invariant=True)
    fp8 = replace(_SPEC, kv_dtype="float8_e4m3fn")
    return [
        Case(_decode("dec_const_16x1k", [1024] * 16)),
        Case(_decode("dec_unif_16x512-1k", uniform_lengths(16, 512, 1024)), variants=("planned_queues",)),
        Case(_decode("dec_zipf_16xmean1k", zipf16)),
        Case(long_decode, variants=("ragged", "page1")),
        Case(_decode("dec_skew_64(1x64k+63x1k)", [65536] + [1024] * 63), variants=("planned_queues",)),
        Case(skewed, variants=("ragged", "planned_queues")),
        Case(_decode("dec_1x128k", [131072])),
        Case(_decode("dec_g8_64x4k", [4096] * 64), replace(_SPEC, num_qo_heads=64)),
        Case(_decode("dec_mha_32x2k", [2048] * 32), replace(_SPEC, num_kv_heads=32)),
        Case(_decode("dec_page1_64x4k", [4096] * 64), replace(_SPEC, page_size=1)),
        Case(_prefill("pre_1x8k", [8192])),
        Case(_prefill("pre_const_16x1k", [1024] * 16), variants=("ragged",)),
        Case(_prefill("pre_zipf_16xmean1k", zipf16)),
        Case(_prefill("pre_1x32k", [32768])),
        Case(Workload("chunk_2k_on_32k", (2048,), (32768 + 2048,))),
        Case(mixed),
        Case(Workload("spec_64x4q_4k", (4,) * 64, (4096,) * 64)),
        Case(_decode("shared_64x(8k+256)", [8192 + 256] * 64, *_groups(1, 64, 8192)), variants=("flat",)),
        Case(
            _decode("shared_4groups16x(4k+512)", [4096 + 512] * 64, *_groups(4, 16, 4096)), variants=("flat",)
        ),
        Case(_decode("shared_256x(2k+64)", [2048 + 64] * 256, *_groups(1, 256, 2048)), variants=("flat",)),
        Case(replace(long_decode, name="fp8kv_dec_const_64x4k"), fp8),
        Case(replace(skewed, name="fp8kv_dec_zipf_128xmean2k"), fp8),
        Case(replace(skewed, name="invariant_dec_zipf_128xmean2k"), invariant, ("not_invariant",)),
        Case(replace(mixed, name="invariant_mixed_2k+64dec4k"), invariant, ("not_invariant",)),
    ]


def layers_for(case: Case, l2_bytes: int) -> int:
    """Return how many layers have to be read in turn so that no KV byte is still in the L2 cache.

    More than twice the cache lies between two uses of a byte; at least four layers.
    """
    return rotated_layers(case.workload.kv_bytes(case.spec), l2_bytes)


def rotated_layers(kv_bytes: int, l2_bytes: int) -> int:
    """Return layers_for() a step that reads so many bytes of K and V in each layer."""
    return max(_MIN_LAYERS, 2 * l2_bytes // kv_bytes + 2)


def make_problem(case: Case, *, layers: int, device: torch.device | str, seed: int = 0) -> Problem:
    """Draw the tensors of a case: every layer has KV of its own, and pages lie in random order."""
    workload, spec = case.workload, case.spec
    table, pages = _block_table(workload, spec.page_size, seed)
    generator = torch.Generator(device).manual_seed(seed)
    shape = (pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    dtype = getattr(torch, spec.dtype)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype, device=device)

    kv_dtype = getattr(torch, spec.kv_dtype)
    return Problem(
        spec=spec,
        q=draw(workload.tokens, spec.num_qo_heads, spec.head_dim),
        layers=[(draw(*shape).to(kv_dtype), draw(*shape).to(kv_dtype)) for _ in range(layers)],
        qo_indptr=torch.tensor([0, *workload.q_lens]).cumsum(0).to(torch.int32).to(device),
        kv_lens=torch.tensor(workload.kv_lens, dtype=torch.int32).to(device),
        block_table=table.to(device),
        prefixes=workload.prefixes,
    )


def _block_table(workload: Workload, page_size: int, seed: int) -> tuple[Tensor, int]:
    """Return int32 [requests, pages of the longest], 0 past a row's pages, and the number of pages."""
    counts = [-(-length // page_size) for length in workload.kv_lens]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    own_from = [0] * len(counts)
    used = 0
    for prefix in workload.prefixes:
        shared = prefix.tokens // page_size
        table[prefix.first : prefix.last, :shared] = torch.arange(used, used + shared, dtype=torch.int32)
        own_from[prefix.first : prefix.last] = [shared] * (prefix.last - prefix.first)
        used += shared
    for row, begin, end in zip(table, own_from, counts, strict=True):
        row[begin:end] = torch.arange(used, used + end - begin, dtype=torch.int32)
        used += end - begin
    order = torch.randperm(used, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    valid = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    return torch.where(valid, order[table.long()], 0).to(torch.int32), used


def contiguous(problem: Problem) -> Problem:
    """Return the problem over the same memory read as contiguous KV: pages of one token, in order."""
    spec = replace(problem.spec, page_size=1)
    lens = problem.kv_lens.long()
    begins = lens.cumsum(0) - lens
    columns = torch.arange(int(lens.max()), device=lens.device)
    table = torch.where(columns < lens[:, None], begins[:, None] + columns, 0)
    shape = (-1, 1, spec.num_kv_heads)
    return replace(
        problem,
        spec=spec,
        layers=[(k.view(*shape, spec.head_dim), v.view(*shape, spec.head_dim_v)) for k, v in problem.layers],
        block_table=table.to(torch.int32),
        prefixes=(),
    )


def single_tokens(problem: Problem, *, seed: int = 0) -> Problem:
    """Return a problem of the same lengths over the same memory in pages of one token, in random order."""
    plain = contiguous(problem)
    total = int(problem.kv_lens.sum())
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(plain.q.device)
    return replace(plain, block_table=order[plain.block_table.long()].to(torch.int32))


def slots(problem: Problem) -> Tensor:
    """Return the cache slot (page * page_size + offset) of every KV token, request by request: int64."""
    page_size, lens = problem.spec.page_size, problem.kv_lens.long()
    tokens = torch.arange(int(lens.max()), device=lens.device)
    table = problem.block_table.long()[:, tokens // page_size] * page_size + tokens % page_size
    return table[tokens < lens[:, None]]
