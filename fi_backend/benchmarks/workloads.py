# SPDX-License-Identifier: Apache-2.0
"""The workloads of `bench kernels` and their tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fi_backend.benchmarks.peers import Problem, SharedPrefix
from fi_backend.core.spec import AttentionSpec

# The block size that vLLM chooses on CPUs.
CPU_SPEC = AttentionSpec(32, 8, 128, dtype="bfloat16", page_size=128)
# Layers are read in turn until so many bytes have passed, so that no cache serves a KV byte twice.
_ROTATED_BYTES = 512 << 20
_MAX_LAYERS = 8


@dataclass(frozen=True)
class Workload:
    """Query and KV tokens of each request, and which of them share their first KV tokens."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    prefixes: tuple[SharedPrefix, ...] = ()

    def kv_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of K and V that one layer has to read at least once."""
        element = getattr(torch, spec.kv_dtype).itemsize
        repeated = sum((each.last - each.first - 1) * each.tokens for each in self.prefixes)
        tokens = sum(self.kv_lens) - repeated
        return int(tokens * spec.num_kv_heads * (spec.head_dim + spec.head_dim_v) * element)

    def io_bytes(self, spec: AttentionSpec) -> int:
        """Bytes of queries and outputs of one layer."""
        element = getattr(torch, spec.dtype).itemsize
        return int(self.tokens * spec.num_qo_heads * (spec.head_dim + spec.head_dim_v) * element)

    def flops(self, spec: AttentionSpec) -> int:
        """Floating-point operations of the two products of one layer, masked keys left out."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 2 * pairs * spec.num_qo_heads * (spec.head_dim + spec.head_dim_v)

    @property
    def tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.q_lens)


def _decode(batch: int, context: int, name: str) -> Workload:
    return Workload(name, (1,) * batch, (context,) * batch)


CPU_WORKLOADS = (
    _decode(16, 2048, "decode 16 x 2k"),
    _decode(1, 32768, "decode 1 x 32k"),
    _decode(64, 1024, "decode 64 x 1k"),
    Workload("prefill 1 x 2k", (2048,), (2048,)),
)


def make_problem(workload: Workload, spec: AttentionSpec, *, seed: int = 0) -> Problem:
    """Draw the tensors of a workload; pages lie in random order."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, spec.dtype)
    counts = [-(-length // spec.page_size) for length in workload.kv_lens]
    shuffled = torch.randperm(sum(counts), generator=generator).to(torch.int32)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, pages in zip(table, shuffled.split(counts), strict=True):
        row[: pages.numel()] = pages
    layers = min(_MAX_LAYERS, max(2, -(-_ROTATED_BYTES // workload.kv_bytes(spec))))
    shape = (sum(counts), spec.page_size, spec.num_kv_heads, spec.head_dim)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32).to(dtype)

    first = draw(*shape), draw(*shape)
    return Problem(
        spec=spec,
        q=draw(workload.tokens, spec.num_qo_heads, spec.head_dim),
        # Other bytes in memory, not other numbers: drawing takes long.
        layers=[first, *((first[0].clone(), first[1].clone()) for _ in range(layers - 1))],
        qo_indptr=torch.tensor([0, *workload.q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        kv_lens=torch.tensor(workload.kv_lens, dtype=torch.int32),
        block_table=table,
    )
