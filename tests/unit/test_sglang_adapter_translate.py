# SPDX-License-Identifier: Apache-2.0
"""SGLang's words for a layer and a step, in ours; needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fi_backend.adapters.sglang.translate import (
    indptr,
    layer_spec,
    query_lengths,
    refuse_options,
    step_limits,
)
from fi_backend.errors import UnsupportedError

LAYER: dict[str, Any] = {
    "tp_q_head_num": 8,
    "tp_k_head_num": 2,
    "qk_head_dim": 80,
    "v_head_dim": 64,
    "scaling": 0.3,
    "sliding_window_size": -1,
    "logit_cap": 0.0,
}


def spec_of(**changes: Any) -> Any:
    return layer_spec(
        SimpleNamespace(**{**LAYER, **changes}),
        dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
        page_size=16,
        sinks=False,
    )


def test_plain_layer() -> None:
    spec = spec_of()
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v) == (8, 2, 80, 64)
    assert (spec.scale, spec.causal, spec.window_left, spec.logits_soft_cap) == (0.3, True, -1, 0.0)
    assert (spec.dtype, spec.kv_dtype, spec.page_size) == ("bfloat16", "float8_e4m3fn", 16)


@pytest.mark.parametrize(("window", "left"), [(None, -1), (-1, -1), (0, 0), (4095, 4095)])
def test_sglang_counts_the_keys_before_the_querys_own(window: int | None, left: int) -> None:
    assert spec_of(sliding_window_size=window).window_left == left


def test_cap() -> None:
    assert spec_of(logit_cap=30).logits_soft_cap == 30.0


@pytest.mark.parametrize(("chunk", "tokens"), [(2048, 8192 + 500 + 5), (16384, 16384 + 500 + 5), (-1, 8697)])
def test_limits(chunk: int, tokens: int) -> None:
    runner = SimpleNamespace(
        server_args=SimpleNamespace(max_prefill_tokens=8192, chunked_prefill_size=chunk),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(5, 500, dtype=torch.int32)),
    )
    limits = step_limits(runner)
    assert (limits.max_requests, limits.max_tokens, limits.max_kv_len) == (5, tokens, 500)


class Mode(SimpleNamespace):
    """As much of a forward mode as is asked."""

    def is_decode(self) -> bool:
        return self.name == "DECODE"


def batch(mode: str, **changes: Any) -> SimpleNamespace:
    fields = {"batch_size": 2, "extend_seq_lens_cpu": [7, 1], "spec_info": None}
    return SimpleNamespace(forward_mode=Mode(name=mode), **{**fields, **changes})


@pytest.mark.parametrize(("mode", "lengths"), [("DECODE", [1, 1]), ("EXTEND", [7, 1]), ("MIXED", [7, 1])])
def test_query_lengths(mode: str, lengths: list[int]) -> None:
    assert query_lengths(batch(mode)) == lengths
    assert indptr(lengths).tolist() == [0, lengths[0], sum(lengths)]
    assert indptr(lengths).dtype is torch.int32


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2", "SPLIT_PREFILL", "PREBUILT"])
def test_modes_that_are_refused(mode: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward mode {mode}"):
        query_lengths(batch(mode))


def test_options() -> None:
    refuse_options({"q_rope": None, "flag": False})
    with pytest.raises(UnsupportedError, match="k_rope, q_rope"):
        refuse_options({"q_rope": torch.zeros(1), "k_rope": torch.zeros(1)})
