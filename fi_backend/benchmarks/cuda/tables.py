# SPDX-License-Identifier: Apache-2.0
"""The tables of `bench kernels --device cuda`: which rows each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fi_backend.benchmarks.cuda import cases
from fi_backend.benchmarks.cuda.cases import Case
from fi_backend.benchmarks.cuda.ours import PAGE1
from fi_backend.benchmarks.variant_oracles import ORACLES
from fi_backend.benchmarks.workloads import Workload
from fi_backend.core.spec import AttentionSpec

TARGETS = "targets"
# Query and KV heads of a layer whose heads are so wide; wide ones are fewer, as in models.
_HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 4)}
_CACHES = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn"}
# Prompts of one length fill so many tokens, so that rows differ in length and not in how full the GPU is.
_PREFILL_TOKENS = 16384
_PREFILL_LENGTHS = tuple(1024 << i for i in range(7))
_GROUPS, _PAGE_SIZES = (1, 4, 5, 7, 8), (1, 16, 64)
_DECODES, _CONTEXT = 64, 4096


def prefill_dims() -> list[Case]:
    """Return causal prefills of 1k to 64k tokens by head dimension and cache type, 16k tokens a step."""
    rows = []
    for head_dim, (qo_heads, kv_heads) in _HEADS.items():
        for cache, kv_dtype in _CACHES.items():
            spec = AttentionSpec(
                qo_heads, kv_heads, head_dim, dtype="bfloat16", kv_dtype=kv_dtype, page_size=16
            )
            for length in _PREFILL_LENGTHS:
                lens = (length,) * max(1, _PREFILL_TOKENS // length)
                name = f"pre_d{head_dim}_{cache}_{len(lens)}x{length // 1024}k"
                rows.append(Case(Workload(name, lens, lens), spec))
    return rows


def decode_pages() -> list[Case]:
    """Return decodes of 64 requests over 4k tokens by head dimension, query heads a KV head, and page size.

    Rows with pages of 16 tokens measure the same batch in pages of one token beside it.
    """
    rows = []
    for head_dim in _HEADS:
        for group in _GROUPS:
            for page_size in _PAGE_SIZES:
                name = f"dec_d{head_dim}_g{group}_page{page_size}_{_DECODES}x{_CONTEXT // 1024}k"
                spec = AttentionSpec(8 * group, 8, head_dim, dtype="bfloat16", page_size=page_size)
                workload = Workload(name, (1,) * _DECODES, (_CONTEXT,) * _DECODES)
                rows.append(Case(workload, spec, (PAGE1,) if page_size == 16 else ()))
    return rows


def shipped_variants() -> list[Case]:
    """Return plain attention with every shipped variant beside it, decoding and in a prefill."""
    decode, prefill = (1,) * _DECODES, (2048,) * 4
    # A bias for each pair of a prefill's tokens would be more bytes than all else.
    few = tuple(name for name in ORACLES if name != "logit_bias")
    return [
        Case(Workload("variants_dec_64x4k", decode, (_CONTEXT,) * _DECODES), variants=tuple(ORACLES)),
        Case(Workload("variants_pre_4x2k", prefill, prefill), variants=few),
    ]


TABLES: Mapping[str, Callable[[], list[Case]]] = {
    TARGETS: lambda: cases.cases(),
    "prefill-dims": prefill_dims,
    "decode-pages": decode_pages,
    "variants": shipped_variants,
}
"""By what `--table` calls them."""


def row_named(name: str) -> Case:
    """Return the row of that name, of any table; raises ValueError for an unknown one."""
    for rows in TABLES.values():
        for case in rows():
            if case.name == name:
                return case
    raise ValueError(f"row: expected a row of `bench kernels --device cuda`; got {name!r}.")
