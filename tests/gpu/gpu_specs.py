# SPDX-License-Identifier: Apache-2.0
"""The native modules that the tests of attention on CUDA use, compiled together before the first test.

Each compilation is one (dtype, cache dtype, head dimensions, variant); whatever else a spec says, a kernel
reads when it runs.
"""

from __future__ import annotations

from typing import Any

from fi_backend.core.spec import AttentionSpec

BF16, FP16, E4M3, E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"

MODULES: dict[str, dict[str, Any]] = {
    "64": {"head_dim": 64},
    "80": {"head_dim": 80},
    "96": {"head_dim": 96},
    "112": {"head_dim": 112},
    "128": {"head_dim": 128},
    "192": {"head_dim": 192},
    "256": {"head_dim": 256},
    "192x128": {"head_dim": 192, "head_dim_v": 128},
    "fp16 64": {"head_dim": 64, "dtype": FP16},
    "fp16 128": {"head_dim": 128, "dtype": FP16},
    "fp16 256": {"head_dim": 256, "dtype": FP16},
    "e4m3 64": {"head_dim": 64, "kv_dtype": E4M3},
    "e4m3 80": {"head_dim": 80, "kv_dtype": E4M3},
    "e4m3 112": {"head_dim": 112, "kv_dtype": E4M3},
    "e4m3 128": {"head_dim": 128, "kv_dtype": E4M3},
    "e4m3 192": {"head_dim": 192, "kv_dtype": E4M3},
    "e4m3 256": {"head_dim": 256, "kv_dtype": E4M3},
    "e4m3 192x128": {"head_dim": 192, "head_dim_v": 128, "kv_dtype": E4M3},
    "e5m2 128": {"head_dim": 128, "kv_dtype": E5M2},
    "fp16 e4m3 128": {"head_dim": 128, "dtype": FP16, "kv_dtype": E4M3},
    "fp16 e5m2 96": {"head_dim": 96, "dtype": FP16, "kv_dtype": E5M2},
    "transform 128": {"head_dim": 128, "alibi": True},
    "transform 256": {"head_dim": 256, "alibi": True},
    "transform e4m3 64": {"head_dim": 64, "kv_dtype": E4M3, "alibi": True},
    "mask 128": {"head_dim": 128, "custom_mask": True},
    "transform mask 64": {"head_dim": 64, "alibi": True, "custom_mask": True},
    "invariant 64": {"head_dim": 64, "batch_invariant": True},
    "invariant 80": {"head_dim": 80, "batch_invariant": True},
    "invariant 96": {"head_dim": 96, "batch_invariant": True},
    "invariant 112": {"head_dim": 112, "batch_invariant": True},
    "invariant 128": {"head_dim": 128, "batch_invariant": True},
    "invariant 256": {"head_dim": 256, "batch_invariant": True},
    "invariant fp16 64": {"head_dim": 64, "dtype": FP16, "batch_invariant": True},
    "invariant fp16 128": {"head_dim": 128, "dtype": FP16, "batch_invariant": True},
    "invariant e4m3 128": {"head_dim": 128, "kv_dtype": E4M3, "batch_invariant": True},
    "invariant transform 64": {"head_dim": 64, "alibi": True, "batch_invariant": True},
}


def spec(name: str, num_qo_heads: int, num_kv_heads: int, **options: Any) -> AttentionSpec:
    """A spec of the module `name`; options that would need another module are not allowed here."""
    fixed = MODULES[name]
    assert not set(options) & {
        "head_dim",
        "head_dim_v",
        "dtype",
        "kv_dtype",
        "custom_mask",
        "batch_invariant",
    }
    if "transform" not in name:
        assert not options.get("alibi")
        assert not options.get("logits_soft_cap")
    return AttentionSpec(num_qo_heads, num_kv_heads, **(fixed | options))


def all_specs() -> list[AttentionSpec]:
    return [AttentionSpec(4, 2, **fixed) for fixed in MODULES.values()]
