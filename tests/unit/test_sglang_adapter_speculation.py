# SPDX-License-Identifier: Apache-2.0
"""Speculation under SGLang: trees that are verified, chains of drafts, lengths that only a GPU knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import draft_utils
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang_graph import Graph, recording
from sglang_step import Engine

from fi_backend.adapters.sglang import compat, tree_mask
from fi_backend.adapters.sglang.backend import FiAttnBackend
from fi_backend.adapters.sglang.draft import FiDraftBackend
from fi_backend.errors import UnsupportedError

DRAFTS = 5
SERVER = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_draft_tokens": DRAFTS,
    "speculative_eagle_topk": 3,
}
SHAPES = {
    "plain": Shape(),
    "page 16, window, cap": Shape(page_size=16, windows=(30, -1), cap=3.0),
    "hybrid pool": Shape(windows=(20, -1), hybrid=True),
}
LAYOUTS = ("the back end's buffer", "drafts alone", "all keys")


def engine_of(shape: Shape, **server: Any) -> Engine:
    engine = Engine(shape, **{**SERVER, **server})
    batch = engine.step(ForwardMode.EXTEND, (5, 70, 33))
    engine.backend.init_forward_metadata(batch)
    for layer in engine.layers:
        engine.check_layer(layer, batch)
    return engine


def verification(engine: Engine, active: tuple[int, ...], layout: str) -> tuple[Any, torch.Tensor]:
    """A step that verifies random trees, in SGLang's words, and the trees."""
    batch = engine.step(ForwardMode.TARGET_VERIFY, tuple(DRAFTS * n for n in active))
    batch.seq_lens = batch.seq_lens - DRAFTS
    batch.seq_lens_cpu = batch.seq_lens.clone()
    trees = (torch.rand(len(engine.active), DRAFTS, DRAFTS, generator=engine.random) < 0.5).tril_()
    trees.diagonal(dim1=1, dim2=2).fill_(True)
    if layout == "all keys":
        prefixes = [torch.ones(DRAFTS, n, dtype=torch.bool) for n in batch.seq_lens.tolist()]
        full = [torch.cat(pair, 1).reshape(-1) for pair in zip(prefixes, trees, strict=True)]
        mask = torch.cat(full)
    else:
        mask = trees.reshape(-1).clone()
    if layout == "the back end's buffer":
        held = engine.backend.verify_mask
        assert held.mode == TreeMaskMode.QLEN_ONLY
        assert held.fits(len(trees))
        held.buffer.fill_(True)
        held.buffer[: mask.numel()] = mask
        mask = held.buffer
    batch.spec_info = SimpleNamespace(custom_mask=mask, draft_token_num=DRAFTS, topk=3)
    batch.extend_seq_lens = batch.extend_seq_lens_cpu = None
    return batch, trees


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_against_the_oracle(name: str, layout: str) -> None:
    engine = engine_of(SHAPES[name])
    for active in ((1, 1, 1), (1, 0, 1)):
        batch, trees = verification(engine, active, layout)
        engine.backend.init_forward_metadata(batch)
        for layer in engine.layers:
            engine.check_layer(layer, batch, masks=trees)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_graphs_verify_trees(name: str, layout: str) -> None:
    engine = engine_of(SHAPES[name])
    unknown = SimpleNamespace(custom_mask=torch.zeros(1), draft_token_num=DRAFTS, topk=3)
    graph = Graph(engine, ForwardMode.TARGET_VERIFY, requests=4, width=DRAFTS, spec_info=unknown)
    for active in ((1, 1, 1), (1, 0, 1), (1, 1, 1)):
        batch, trees = verification(engine, active, layout)
        graph.replay(batch, masks=trees)


def test_a_chain_needs_no_mask() -> None:
    engine = engine_of(Shape(), speculative_eagle_topk=1)
    batch, _ = verification(engine, (1, 1, 1), "drafts alone")
    batch.spec_info.topk = 1
    engine.backend.init_forward_metadata(batch)
    assert engine.backend._step.mask is None
    for layer in engine.layers:
        engine.check_layer(layer, batch)


def test_masks_that_come_after_the_plan() -> None:
    """SGLang may plan beside the drafts and says afterwards that their masks are there."""
    engine = engine_of(Shape())
    batch, trees = verification(engine, (1, 1, 1), "the back end's buffer")
    late = batch.spec_info.custom_mask.clone()
    batch.spec_info.custom_mask.fill_(True)
    engine.backend.init_forward_metadata(batch)
    batch.spec_info.custom_mask.copy_(late)
    engine.backend.update_verify_buffers_to_fill_after_draft(batch.spec_info, None)
    engine.check_layer(engine.layers[0], batch, masks=trees)


def test_without_speculation_there_is_no_buffer() -> None:
    assert Engine(Shape()).backend.verify_mask is None


def test_lengths_that_the_host_does_not_know() -> None:
    engine = engine_of(SHAPES["hybrid pool"])
    engine.backend._arrays._on_device = True
    for mode, known in ((ForwardMode.DECODE, False), (ForwardMode.DECODE, True), (ForwardMode.MIXED, True)):
        batch = engine.step(mode, (1, 1, 1))
        if not known:
            batch.seq_lens_cpu = None
        engine.backend.init_forward_metadata(batch)
        step = engine.backend._step
        assert (step.kv_lens_host is not None, step.qo_indptr_host is not None) == (known, known)
        for layer in engine.layers:
            engine.check_layer(layer, batch)
    graph = Graph(engine, ForwardMode.DECODE)
    batch = engine.step(ForwardMode.DECODE, (1, 1, 1))
    batch.seq_lens_cpu = None
    graph.replay(batch)


def drafts(engine: Engine, **changes: Any) -> FiDraftBackend:
    factory = SimpleNamespace(topk=1, speculative_num_steps=4)
    vars(factory).update(changes)
    return FiDraftBackend(engine.runner, factory)


def test_a_chain_of_drafts() -> None:
    """Each step reads one token more than seq_lens says: what the steps before it appended."""
    engine = engine_of(SHAPES["page 16, window, cap"])
    chain = drafts(engine)
    assert len(chain.attn_backends) == 3
    batches = [engine.step(ForwardMode.DECODE, (1, 1, 1)) for _ in range(3)]
    first = batches[0]
    first.seq_lens = first.seq_lens - 1
    first.seq_lens_cpu = first.seq_lens.clone()
    first.spec_info = SimpleNamespace()
    slots = [batch.out_cache_loc for batch in batches]
    chain.init_forward_metadata(first)
    for backend, own in zip(chain.attn_backends, slots, strict=True):
        first.out_cache_loc = own
        engine.backend = backend
        for layer in engine.layers:
            engine.check_layer(layer, first)


def test_drafts_that_branch_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="speculative_eagle_topk=2"):
        drafts(engine_of(Shape()), topk=2)


@pytest.mark.parametrize("decodes", [True, False])
def test_sglang_makes_the_back_ends_of_drafts(monkeypatch: pytest.MonkeyPatch, decodes: bool) -> None:
    runner = engine_of(Shape()).runner
    runner.draft_attention_backend = "fi"
    factory = draft_utils.DraftBackendFactory.__new__(draft_utils.DraftBackendFactory)
    vars(factory).update(
        draft_model_runner=runner,
        draft_attn_backend="fi",
        topk=1,
        speculative_num_steps=3,
        server_args=runner.server_args,
    )
    if hasattr(draft_utils, "attention_backends"):
        monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("triton", "triton"))
    known = factory._create_triton_decode_backend if decodes else factory._create_triton_prefill_backend
    made = compat._with_drafts(
        draft_utils.DraftBackendFactory._create_backend,
        factory,
        "decode_attention_backend",
        {"triton": known},
        "EAGLE is not supported in decode attention backend {backend_type}",
    )
    assert type(made) is (FiDraftBackend if decodes else FiAttnBackend)


def test_masks_of_all_steps_are_allocated_when_the_back_end_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of any size, with a graph or without, then find memory for them, and graphs one address."""
    engine = engine_of(Shape())
    monkeypatch.setattr(tree_mask, "MaskBuffer", lambda **_: pytest.fail("allocated for a step"))
    unknown = SimpleNamespace(custom_mask=torch.zeros(1), draft_token_num=DRAFTS, topk=3)
    graph = Graph(engine, ForwardMode.TARGET_VERIFY, requests=4, width=DRAFTS, spec_info=unknown)
    for eager in (True, False, True):
        batch, trees = verification(engine, (1, 1, 1), "drafts alone")
        if eager:
            engine.backend.init_forward_metadata(batch)
            engine.check_layer(engine.layers[0], batch, masks=trees)
            for layer in engine.layers[1:]:
                engine.check_layer(layer, batch, masks=trees)
        else:
            graph.replay(batch, masks=trees)


def test_chains_need_no_memory_for_masks() -> None:
    assert engine_of(Shape(), speculative_eagle_topk=1).backend._masks is None
    # SGLang takes the breadth of n-gram drafts for the branches, and masks them whatever it is.
    ngram = {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 1}
    assert engine_of(Shape(), **ngram).backend._masks is not None


@pytest.mark.parametrize("name", ["plain", "hybrid pool"])
def test_graphs_of_a_chain_of_drafts(name: str) -> None:
    """SGLang gives the slots of all steps at once, request by request; a graph takes a step's own."""
    engine = engine_of(SHAPES[name])
    chain, requests = drafts(engine), 4
    steps, before = len(chain.attn_backends), list(engine.lengths)
    batches = [engine.step(ForwardMode.DECODE, (1, 1, 1)) for _ in range(steps)]
    unused = engine.step(ForwardMode.DECODE, (1, 1, 1)).out_cache_loc  # of the step that is not run
    slots = torch.stack([*(batch.out_cache_loc for batch in batches), unused], 1).reshape(-1)
    static = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=requests,
        req_pool_indices=torch.zeros(requests, dtype=torch.int64),
        seq_lens=torch.ones(requests, dtype=torch.int64),
        seq_lens_cpu=torch.ones(requests, dtype=torch.int64),
        seq_lens_sum=requests,
        out_cache_loc=torch.zeros(requests * (steps + 1), dtype=torch.int64),
        spec_info=SimpleNamespace(),
    )
    chain.init_cuda_graph_state(requests, requests)
    chain.init_forward_metadata_out_graph(static, in_capture=True)
    inputs = {}
    calls: list[Any] = []
    for step, backend in enumerate(chain.attn_backends):
        for layer in engine.layers:
            given = [engine.normal(requests, *size) for size in ((128,), (2, 32), (2, 32))]
            static_slots = torch.zeros(requests, dtype=torch.int64)
            view = SimpleNamespace(forward_mode=ForwardMode.DECODE, out_cache_loc=static_slots)
            backend.forward(*given, layer, view)  # warm
            with recording(calls):
                out = backend.forward(*given, layer, view)
            inputs[step, layer.layer_id] = given, out, static_slots
    static.req_pool_indices[:3] = batches[0].req_pool_indices
    static.seq_lens[:3] = static.seq_lens_cpu[:3] = torch.tensor(before)
    static.out_cache_loc = slots
    chain.init_forward_metadata_out_graph(static)
    for step in range(steps):
        for layer in engine.layers:
            inputs[step, layer.layer_id][2][:3] = batches[step].out_cache_loc
    for call in calls:
        call()
    for step in range(steps):
        engine.lengths = [length + step + 1 for length in before]
        engine.active, engine.new = [0, 1, 2], [1, 1, 1]
        for layer in engine.layers:
            (q, k, v), out, _ = inputs[step, layer.layer_id]
            engine.compare(layer, q, k, v, out)
