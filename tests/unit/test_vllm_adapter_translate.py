# SPDX-License-Identifier: Apache-2.0
"""vLLM's words for a layer and a step, in ours; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fi_backend.adapters.vllm import compat
from fi_backend.adapters.vllm.translate import (
    layer_spec,
    refuse_micro_batches,
    refuse_unknown_options,
    step_limits,
)
from fi_backend.errors import UnsupportedError

LAYER: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_size": 80,
    "scale": 0.3,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 24,
    "sliding_window": None,
    "logits_soft_cap": None,
    "alibi": False,
    "sinks": False,
    "batch_invariant": False,
}


def test_plain_layer() -> None:
    spec = layer_spec(**LAYER)
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.page_size) == (8, 2, 80, 24)
    assert (spec.scale, spec.causal, spec.window_left, spec.logits_soft_cap) == (0.3, True, -1, 0.0)
    assert (spec.dtype, spec.kv_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(("window", "left"), [(1, 0), (2, 1), (4096, 4095)])
def test_vllm_counts_the_querys_own_key_in_a_window(window: int, left: int) -> None:
    assert layer_spec(**{**LAYER, "sliding_window": window}).window_left == left


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", "bfloat16"),
        ("float16", "float16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
    ],
)
def test_kv_dtypes(name: str, dtype: str) -> None:
    assert layer_spec(**{**LAYER, "kv_cache_dtype": name}).kv_dtype == dtype


def test_unknown_kv_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="nvfp4"):
        layer_spec(**{**LAYER, "kv_cache_dtype": "nvfp4"})


def test_layer_options_that_are_on_are_refused() -> None:
    refuse_unknown_options({"chunk_lookback": -1, "use_alibi_sqrt": False, "indexer": None})
    with pytest.raises(UnsupportedError, match="chunk_lookback=2"):
        refuse_unknown_options({"chunk_lookback": 2})


def test_micro_batches_are_refused() -> None:
    refuse_micro_batches(SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False)))
    with pytest.raises(UnsupportedError, match="enable_dbo"):
        refuse_micro_batches(SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=True)))


def _config(speculation: Any = None) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=100),
        model_config=SimpleNamespace(max_model_len=1000),
        speculative_config=speculation,
    )


def test_limits_of_a_step() -> None:
    limits = step_limits(_config())
    assert (limits.max_requests, limits.max_tokens, limits.max_kv_len) == (4, 100, 1000)


def test_limits_leave_room_for_drafts() -> None:
    limits = step_limits(_config(SimpleNamespace(num_speculative_tokens=3)))
    assert limits.max_requests == 4
    assert limits.max_tokens >= 100 + 4 * 3
    assert limits.max_kv_len >= 1003


def test_limits_of_chunked_local_attention_count_chunks_as_requests() -> None:
    # Four requests whose queries start and end inside chunks of 32: 100 tokens touch at most 3 + 2 * 4 - 4.
    assert step_limits(_config(), attention_chunk_size=32).max_requests >= 8


def _common(bounds: torch.Tensor | None, device: str = "cpu") -> Any:
    return SimpleNamespace(
        num_reqs=2,
        seq_lens=torch.tensor([5, 6, 0], dtype=torch.int32, device=device),
        seq_lens_cpu_upper_bound=bounds,
    )


def test_host_lengths_are_exact_where_the_device_is_the_host() -> None:
    too_small = torch.tensor([1, 1, 0], dtype=torch.int32)
    assert compat.kv_len_bounds(_common(too_small), limit=100).tolist() == [5, 6]
    assert compat.kv_len_bounds(_common(None), limit=100).tolist() == [5, 6]


def test_a_device_is_never_waited_for() -> None:
    """The tensors on the meta device would raise if they were read."""
    bounds = torch.tensor([7, 8, 0], dtype=torch.int32)
    assert compat.kv_len_bounds(_common(bounds, device="meta"), limit=100).tolist() == [7, 8]
    assert compat.kv_len_bounds(_common(None, device="meta"), limit=100) is None, "the device plans then"


def test_drafts_widen_the_bounds_up_to_the_limit() -> None:
    bounds = torch.tensor([7, 8, 0], dtype=torch.int32)
    assert compat.kv_len_bounds(_common(bounds, device="meta"), drafts=4, limit=11).tolist() == [11, 11]
    assert compat.kv_len_bounds(_common(bounds, device="meta"), limit=7).tolist() == [7, 7]
    assert bounds.tolist() == [7, 8, 0], "vLLM's own tensor was written to"
