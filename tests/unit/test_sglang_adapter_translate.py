# SPDX-License-Identifier: Apache-2.0
"""SGLang's words for a layer and a step, in ours; needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fi_backend.adapters.sglang.refuse import refuse_draft, refuse_options
from fi_backend.adapters.sglang.translate import Lengths, indptr, layer_spec, step_lengths, step_limits
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


@pytest.mark.parametrize(("named", "greatest", "tokens"), [(4, None, 4), (4, 9, 9), (None, None, 1)])
def test_limits_of_speculation(named: int | None, greatest: int | None, tokens: int) -> None:
    runner = SimpleNamespace(
        server_args=SimpleNamespace(
            max_prefill_tokens=100,
            chunked_prefill_size=-1,
            speculative_algorithm="EAGLE",
            speculative_num_draft_tokens=named,
            max_speculative_num_draft_tokens=greatest,
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(5, 500, dtype=torch.int32)),
    )
    assert step_limits(runner).max_tokens == 100 + 500 + 5 * tokens


def batch(mode: str, **changes: Any) -> SimpleNamespace:
    fields = {"extend_seq_lens": torch.tensor([7, 1]), "extend_seq_lens_cpu": [7, 1], "spec_info": None}
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), **{**fields, **changes})


def test_lengths_of_plain_steps() -> None:
    assert step_lengths(batch("DECODE")) == Lengths(1)
    for mode in ("EXTEND", "MIXED"):
        lengths = step_lengths(batch(mode))
        assert (lengths.width, lengths.q_lens_host, lengths.more_kv) == (None, [7, 1], 0)
        assert lengths.q_lens is not None
    assert indptr([7, 1]).tolist() == [0, 7, 8]
    assert indptr([7, 1]).dtype is torch.int32


def test_lengths_of_speculation() -> None:
    """SGLang's seq_lens leave out the tokens that are verified, and those that a chain of drafts appends."""
    verify = batch("TARGET_VERIFY", spec_info=SimpleNamespace(draft_token_num=4))
    assert step_lengths(verify) == Lengths(4, more_kv=4)
    drafts = batch("DECODE", spec_info=SimpleNamespace())
    assert step_lengths(drafts, draft_step=2) == Lengths(1, more_kv=3)
    tensor = torch.tensor([3, 3])
    of_graph = SimpleNamespace(extend_seq_lens_tensor=tensor, extend_seq_lens_cpu=[3, 3])
    assert step_lengths(batch("DRAFT_EXTEND_V2", spec_info=of_graph)) == Lengths(None, tensor, [3, 3])
    eager = SimpleNamespace(num_tokens_per_req=3)
    assert step_lengths(batch("DRAFT_EXTEND_V2", spec_info=eager)).q_lens_host == [7, 1]
    capture = batch("DRAFT_EXTEND_V2", spec_info=eager, extend_seq_lens=None)
    assert step_lengths(capture) == Lengths(3)


@pytest.mark.parametrize("mode", ["SPLIT_PREFILL", "PREBUILT", "DLLM_EXTEND"])
def test_modes_that_are_refused(mode: str) -> None:
    with pytest.raises(UnsupportedError, match=f"forward mode {mode}"):
        step_lengths(batch(mode))


def test_steps_that_do_not_fit_their_mode_are_refused() -> None:
    ragged = SimpleNamespace(draft_token_num=4, ragged_verify_layout=object())
    with pytest.raises(UnsupportedError, match="forward mode TARGET_VERIFY with SimpleNamespace"):
        step_lengths(batch("TARGET_VERIFY", spec_info=ragged))
    with pytest.raises(UnsupportedError, match="forward mode DECODE with SimpleNamespace"):
        step_lengths(batch("DECODE", spec_info=SimpleNamespace()))


def test_drafts_that_branch_are_refused() -> None:
    refuse_draft(1)
    with pytest.raises(UnsupportedError, match=r"speculative_eagle_topk=4: .*speculative-draft-attention"):
        refuse_draft(4)


def test_options() -> None:
    refuse_options({"q_rope": None, "flag": False})
    with pytest.raises(UnsupportedError, match="k_rope, q_rope"):
        refuse_options({"q_rope": torch.zeros(1), "k_rope": torch.zeros(1)})
