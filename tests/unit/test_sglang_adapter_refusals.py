# SPDX-License-Identifier: Apache-2.0
"""What the back end refuses under SGLang: engines, layers, caches, steps, options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape, make_runner

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.arg_groups import overrides
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs
from sglang_step import STEPS, Engine

from fi_backend.adapters.sglang import compat
from fi_backend.adapters.sglang.backend import FiAttnBackend
from fi_backend.adapters.sglang.refuse import REFUSED_ARGUMENTS
from fi_backend.adapters.sglang.translate import draft_tokens
from fi_backend.errors import UnsupportedError

DECIDES_BESIDE = hasattr(overrides, "resolution_result")


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"speculative_algorithm": "DFLASH"}, "speculative_algorithm='DFLASH' .fi verifies EAGLE, "),
        *(
            ({name: value}, f"{name}={value!r} ")
            for name, value in {
                "dllm_algorithm": "LowConfidence",
                "enable_torch_compile": True,
                "enable_two_batch_overlap": True,
                "enable_pdmux": True,
                "enable_dp_attention": True,
                "dcp_size": 2,
                "attn_cp_size": 2,
                "disaggregation_mode": "prefill",
                "enable_hierarchical_cache": True,
                "enable_lmcache": True,
                "enable_unified_memory": True,
                "enable_multi_layer_eagle": True,
                "attn_dp_size": 2,
            }.items()
        ),
    ],
)
def test_engines_that_are_refused(server: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        FiAttnBackend(make_runner(Shape(), **server))


def test_every_refused_argument_is_tried_and_is_off_by_default() -> None:
    [mark] = test_engines_that_are_refused.pytestmark
    assert {name for server, _ in mark.args[1] for name in server} > set(REFUSED_ARGUMENTS)
    FiAttnBackend(make_runner(Shape()))


@pytest.mark.skipif(not DECIDES_BESIDE, reason="0.5.17 writes its decisions into the record")
def test_what_sglang_has_decided_is_refused_too() -> None:
    """0.5.23 turns --enable-dp-attention into a number of parts, and changes nothing in the record."""
    runner = make_runner(Shape())
    runner.server_args = ServerArgs(model_path="none")
    overrides.declare_resolution(runner.server_args, "test", attn_dp_size=2)
    with pytest.raises(UnsupportedError, match=r"attn_dp_size=2 \(data-parallel attention\)"):
        FiAttnBackend(compat.settled(runner))


def test_drafts_that_sglang_has_chosen_are_counted() -> None:
    """Memory for masks of trees is made for as many: 0.5.23 chooses a number where none is given."""
    runner = make_runner(Shape(), speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    if DECIDES_BESIDE:
        runner.server_args = ServerArgs(model_path="none", speculative_algorithm="EAGLE")
        overrides.declare_resolution(runner.server_args, "test", speculative_num_draft_tokens=4)
    assert draft_tokens(compat.settled(runner)) == 4


def test_steps_planned_on_another_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    with pytest.raises(UnsupportedError, match="SGLANG_ENABLE_OVERLAP_PLAN_STREAM: not supported by fi"):
        FiAttnBackend(make_runner(Shape()))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("use_mla_backend", True, "an MLA model"),
        ("device", "npu", "device='npu'"),
        ("model_config", SimpleNamespace(is_encoder_decoder=True), "an encoder-decoder model"),
    ],
)
def test_runners_that_are_refused(name: str, value: Any, words: str) -> None:
    runner = make_runner(Shape())
    setattr(runner, name, value)
    with pytest.raises(UnsupportedError, match=words):
        FiAttnBackend(runner)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("is_cross_attention", True, "cross attention"),
        ("attn_type", SimpleNamespace(value="encoder_only"), "attn_type=encoder_only"),
        ("use_irope", True, "use_irope"),
        ("xai_temperature_len", 8, "xai_temperature_len=8"),
        ("pos_encoding_mode", "ALIBI", "pos_encoding_mode=ALIBI"),
    ],
)
def test_layers_that_are_refused(name: str, value: Any, words: str) -> None:
    runner = make_runner(Shape())
    setattr(runner.model[1], name, value)
    with pytest.raises(UnsupportedError, match=f"attention layer 1: .*{words}"):
        FiAttnBackend(runner)


def test_another_layout_of_the_cache_is_refused() -> None:
    class Packed(MHATokenToKVPool):
        pass

    runner = make_runner(Shape())
    runner.token_to_kv_pool.__class__ = Packed
    with pytest.raises(UnsupportedError, match="KV cache of the kind Packed"):
        FiAttnBackend(runner)
    runner = make_runner(Shape())
    runner.token_to_kv_pool.kv_cache_layout = "hnd"
    with pytest.raises(UnsupportedError, match="KV cache layout hnd"):
        FiAttnBackend(runner)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward_mode": ForwardMode.DLLM_EXTEND}, "forward mode DLLM_EXTEND"),
        ({"forward_mode": ForwardMode.DECODE, "spec_info": object()}, "forward mode DECODE with object"),
    ],
)
def test_steps_that_are_refused(change: dict[str, Any], words: str) -> None:
    engine = Engine(Shape())
    batch = engine.step(*STEPS[0])
    vars(batch).update(change)
    with pytest.raises(UnsupportedError, match=words):
        engine.backend.init_forward_metadata(batch)


def test_an_unknown_option_of_a_model_is_refused() -> None:
    engine = Engine(Shape())
    batch = engine.step(*STEPS[0])
    engine.backend.init_forward_metadata(batch)
    q, k, v = torch.zeros(76, 128), torch.zeros(76, 2, 32), torch.zeros(76, 2, 32)
    with pytest.raises(UnsupportedError, match="q_rope"):
        engine.backend.forward(q, k, v, engine.layers[0], batch, q_rope=torch.zeros(1))
    engine.backend.forward(q, k, v, engine.layers[0], batch, q_rope=None)
