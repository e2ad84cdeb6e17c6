# SPDX-License-Identifier: Apache-2.0
"""CPU attention of this package beside vLLM's own CPU operator, in one process with the same threads.

Every contender owns the same number of KV caches ("layers"), each filled with the same tokens in the layout
that it wants, and visits them in turn, so that nothing is served from L2. Contenders take turns within one
repeat. vLLM is optional; without it only our rows are returned.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch of equal requests; q_len 1 is decode. dtype: of queries and of the KV cache."""

    batch: int = 16
    kv_len: int = 2048
    q_len: int = 1
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of all requests [batch * kv_len, ...], qo_indptr, kv_lens."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        tokens = self.batch * self.kv_len
        q = normal(self.batch * self.q_len, self.num_qo_heads, self.head_dim)
        k, v = (normal(tokens, self.num_kv_heads, self.head_dim) for _ in range(2))
        qo_indptr = torch.arange(self.batch + 1, dtype=torch.int32) * self.q_len
        return q, k, v, qo_indptr, torch.full((self.batch,), self.kv_len, dtype=torch.int32)

    def pages(self, page_size: int) -> tuple[Tensor, Tensor]:
        """A block table of permuted pages, and the slot of every token."""
        columns = -(-self.kv_len // page_size)
        pages = torch.randperm(self.batch * columns, generator=torch.Generator().manual_seed(1))
        table = pages.view(self.batch, columns).to(torch.int32)
        token = torch.arange(self.kv_len)
        slots = table[:, token // page_size].long() * page_size + token % page_size
        return table, slots.view(-1)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute the workload: run(layer) works on that layer's cache and returns the output."""

    name: str
    page_size: int
    run: Callable[[int], Tensor]


def ours(w: Workload, page_size: int, layers: int, kv_layout: str) -> Contender:
    """This package over caches in "NHD" (token major) or "HND" (head major, K beside V as vLLM has them)."""
    q, k, v, qo_indptr, kv_lens = w.inputs()
    table, slots = w.pages(page_size)
    pages = table.numel()
    caches: list[tuple[Tensor, Tensor]] = []
    for _ in range(layers):
        if kv_layout == "NHD":
            both = torch.zeros(2, pages, page_size, w.num_kv_heads, w.head_dim, dtype=w.dtype)
            caches.append((both[0], both[1]))
        else:
            packed = torch.zeros(pages, w.num_kv_heads, page_size, 2 * w.head_dim, dtype=w.dtype)
            caches.append((packed[..., : w.head_dim].transpose(1, 2), packed[..., w.head_dim :].transpose(1, 2)))
        append_kv(k, v, *caches[-1], slots)
    dtype = str(w.dtype).removeprefix("torch.")
    spec = AttentionSpec(w.num_qo_heads, w.num_kv_heads, w.head_dim, dtype=dtype, page_size=page_size)
    attention = BatchAttention(
        spec, max_requests=w.batch, max_tokens=w.batch * w.q_len, max_kv_len=w.kv_len
    )
    attention.plan(qo_indptr, PageTable.from_block_table(table, kv_lens, page_size=page_size))
    out = torch.empty_like(q)
    return Contender(
        f"fi_backend {kv_layout}", page_size, lambda layer: attention.run(q, *caches[layer], out=out)
    )


def vllm_cpu(w: Workload, page_size: int, layers: int) -> Contender:
    """vLLM's cpu_attention_with_kv_cache, with the instruction set that its back end would choose."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    torch.cpu._init_amx()  # the process has to ask the system for the tile registers
    isa = _get_attn_isa(w.dtype, page_size, w.head_dim)
    q, k, v, qo_indptr, kv_lens = w.inputs()
    table, slots = w.pages(page_size)
    caches = []
    for _ in range(layers):
        packed = torch.zeros(table.numel(), w.num_kv_heads, 2 * page_size, w.head_dim, dtype=w.dtype)
        caches.append(packed.chunk(2, dim=2))
        ops.cpu_attn_reshape_and_cache(k, v, *caches[-1], slots, isa)
    scale = w.head_dim**-0.5
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=w.batch,
        num_heads=w.num_qo_heads,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        seq_lens=kv_lens,
        dtype=w.dtype,
        query_start_loc=qo_indptr,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    out = torch.empty_like(q)

    def run(layer: int) -> Tensor:
        arguments: dict[str, Any] = {
            "query": q,
            "key_cache": caches[layer][0],
            "value_cache": caches[layer][1],
            "output": out,
            "query_start_loc": qo_indptr,
            "seq_lens": kv_lens,
            "scale": scale,
            "causal": True,
            "alibi_slopes": None,
            "sliding_window": -1,
            "block_table": table,
            "softcap": 0.0,
            "scheduler_metadata": metadata,
            "s_aux": None,
        }
        ops.cpu_attention_with_kv_cache(**arguments)
        return out

    return Contender(f"vllm-cpu {isa}", page_size, run)


def contenders(w: Workload, layers: int, page_sizes: tuple[int, ...]) -> list[Contender]:
    """Ours and, where vLLM is installed, its operator, for every page size."""
    found = [ours(w, size, layers, layout) for size in page_sizes for layout in ("NHD", "HND")]
    try:
        import vllm  # noqa: F401
    except ImportError:
        return found
    return found + [vllm_cpu(w, size, layers) for size in page_sizes]


def measure(
    w: Workload,
    *,
    threads: int,
    layers: int = 4,
    repeats: int = 7,
    page_sizes: tuple[int, ...] = (16, 32),
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time all contenders on `w` and return one row each, in one run with the same threads.

    Row: name, page_size, threads, median_us and min_us of one layer, tokens_per_s (query tokens at the
    median), gb_per_s (KV bytes at the median). Raises AssertionError if outputs disagree.
    """
    torch.set_num_threads(threads)
    runners = []
    for runner in contenders(w, layers, page_sizes):
        progress(f"warming up {runner.name}, page size {runner.page_size}")
        output = runner.run(0).clone()
        runners.append(runner)
        if len(runners) == 1:
            expected = output
        torch.testing.assert_close(output, expected, atol=2e-2, rtol=2e-2)
    times: list[list[float]] = [[] for _ in runners]
    for repeat in range(repeats):
        progress(f"repeat {repeat + 1} of {repeats}")
        for runner, samples in zip(runners, times, strict=True):
            start = time.perf_counter()
            for layer in range(layers):
                runner.run(layer)
            samples.append((time.perf_counter() - start) / layers)
    element = torch.finfo(w.dtype).bits // 8
    kv_bytes = 2 * w.batch * w.kv_len * w.num_kv_heads * w.head_dim * element
    rows = []
    for runner, samples in zip(runners, times, strict=True):
        median = statistics.median(samples)
        rows.append(
            {
                "name": runner.name,
                "page_size": runner.page_size,
                "threads": threads,
                "median_us": median * 1e6,
                "min_us": min(samples) * 1e6,
                "tokens_per_s": w.batch * w.q_len / median,
                "gb_per_s": kv_bytes / median / 1e9,
            }
        )
    return rows


def main() -> None:
    """Print the rows of one workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field, default in (("batch", 16), ("kv-len", 2048), ("q-len", 1), ("head-dim", 128)):
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QO", "KV"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 32])
    a = parser.parse_args()
    workload = Workload(a.batch, a.kv_len, a.q_len, *a.heads, a.head_dim, getattr(torch, a.dtype))
    rows = measure(
        workload, threads=a.threads, layers=a.layers, repeats=a.repeats, page_sizes=tuple(a.page_sizes)
    )
    for row in rows:
        print(
            f"{row['name']:16} page {row['page_size']:4}  median {row['median_us']:10.0f} us  "
            f"min {row['min_us']:10.0f} us  {row['tokens_per_s']:9.0f} tok/s  {row['gb_per_s']:6.2f} GB/s"
        )


if __name__ == "__main__":
    main()
