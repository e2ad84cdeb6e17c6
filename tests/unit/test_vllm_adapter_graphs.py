# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs ask of the metadata builder: addresses, padded steps, dummy steps, counts."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.attention.backend import AttentionCGSupport
from vllm_step import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    make_builder,
    make_cache,
    make_common,
    make_layer,
    run_step,
    stand_in_config,
)

from fi_backend.adapters.vllm import compat, metadata
from fi_backend.adapters.vllm.metadata import FiMetadataBuilder
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import counters


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in_config(monkeypatch)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whether torch says that the current stream is being captured."""
    state = SimpleNamespace(now=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.now)
    return state


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments of every plan; nothing is planned."""
    calls = []

    def plan(self: BatchAttention, qo_indptr: Any, table: Any, **host: Any) -> None:
        calls.append({"qo_indptr": qo_indptr, "table": table, **host})

    monkeypatch.setattr(BatchAttention, "plan", plan)
    return calls


class _Counted:
    """Differences of the counters since it was made."""

    def __init__(self) -> None:
        self._before = asdict(counters().snapshot())

    def __call__(self, *names: str) -> tuple[int, ...]:
        after = asdict(counters().snapshot())
        return tuple(after[name] - self._before[name] for name in names)


def _attend(layer: Any, planned: Any) -> None:
    q = torch.zeros(planned.num_actual_tokens, HEADS, HEAD_DIM)
    layer.impl.forward(layer, q, q, q, make_cache(), planned, torch.empty_like(q))


@pytest.mark.parametrize(
    ("device", "support"), [("cuda", AttentionCGSupport.ALWAYS), ("cpu", AttentionCGSupport.NEVER)]
)
def test_full_graphs_of_any_batch_on_a_gpu(device: str, support: AttentionCGSupport) -> None:
    asked = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    assert FiMetadataBuilder.get_cudagraph_support(asked, None) is support


def test_plans_name_vllms_own_memory(config: Any, plans: list[dict[str, Any]]) -> None:
    """A graph captured with one step serves another of the same padded size: the addresses are vLLM's."""
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    starts, lens = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    blocks = torch.zeros(8, 4, dtype=torch.int32)
    for requests in (4, 2, 4):
        builder.build(
            0,
            make_common(
                [1] * requests,
                [5] * requests,
                query_start_loc=starts[: requests + 1],
                seq_lens=lens[:requests],
                block_table_tensor=blocks[:requests],
            ),
        )
    for call in plans:
        table = call["table"]
        assert call["qo_indptr"].data_ptr() == starts.data_ptr()
        assert table.kv_lens.data_ptr() == lens.data_ptr()
        assert table.indices.data_ptr() == blocks.data_ptr()
    first, _, again = (call["table"] for call in plans)
    assert first.row_begin.data_ptr() == again.row_begin.data_ptr()
    assert first.row_end.data_ptr() == again.row_end.data_ptr()


def test_padded_requests_change_nothing(config: Any) -> None:
    """vLLM pads a step to the size of a graph: no query tokens, no keys, block 0, slot -1."""
    layer = make_layer(config, "layer")
    exact = make_common([2, 1], [20, 33])
    padded = make_common([2, 1, 0, 0], [20, 33, 0, 0], num_actual_tokens=6)
    padded.block_table_tensor[2:] = 0
    padded.slot_mapping = torch.cat([exact.slot_mapping, torch.full((3,), -1)])
    outputs = []
    for common in (exact, padded):
        common.num_actual_tokens = 6  # so that both draw the same numbers
        outputs.append(run_step(config, layer, common, make_cache()))
    assert torch.equal(outputs[0][:3], outputs[1][:3])
    assert not outputs[0][:3].isnan().any()
    assert make_builder(config, ["layer"]).build(0, padded).num_actual_tokens == 3


def test_dummy_steps_longer_than_any_request_are_planned(config: Any, plans: list[dict[str, Any]]) -> None:
    make_layer(config, "layer")
    lens = torch.tensor([500, 7], dtype=torch.int32, device="meta")
    bounds = torch.tensor([500, 7], dtype=torch.int32)
    common = SimpleNamespace(num_reqs=2, seq_lens=lens, seq_lens_cpu_upper_bound=bounds)
    assert compat.kv_len_bounds(common, limit=128).tolist() == [128, 7]
    assert bounds.tolist() == [500, 7]


def test_lengths_that_only_the_device_knows_are_planned_there(
    config: Any, plans: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_layer(config, "layer")
    monkeypatch.setattr(metadata.compat, "kv_len_bounds", lambda *_, **__: None)
    planned = make_builder(config, ["layer"]).build(0, make_common([2, 1], [20, 33]))
    assert plans[0]["qo_indptr_host"] is None
    assert plans[0]["kv_lens_host"] is None
    assert planned.num_actual_tokens == 3


def test_calls_are_counted_whoever_makes_them(config: Any, capturing: Any) -> None:
    """Layers x steps is the sum of calls from Python, calls inside graphs, and calls that were recorded."""
    names = ["a", "b"]
    layers = [make_layer(config, name) for name in names]
    builder = make_builder(config, names)
    counted = _Counted()
    kinds = "steps", "attention_calls", "captured_calls", "replayed_calls", "tokens"

    eager = builder.build(0, make_common([2, 1], [20, 33]))
    for layer in layers:
        _attend(layer, eager)
    assert counted(*kinds) == (1, 2, 0, 0, 6)

    dummy = make_common([1, 1], [1, 1])
    for capture in (False, True):  # vLLM warms up before it captures
        planned = builder.build_for_cudagraph_capture(dummy)
        capturing.now = capture
        for layer in layers:
            _attend(layer, planned)
        capturing.now = False
    assert counted(*kinds) == (3, 4, 2, 0, 10)

    builder.build(0, make_common([1, 1], [21, 34]))  # replayed: no layer calls
    assert counted(*kinds) == (4, 4, 2, 2, 14)

    mixed = builder.build(0, make_common([3, 1], [20, 35]))  # too large for any graph
    for layer in layers:
        _attend(layer, mixed)
    assert counted(*kinds) == (5, 6, 2, 2, 22)
    steps, calls, captured, replayed, _ = counted(*kinds)
    assert len(layers) * steps == calls + captured + replayed


def test_sinks_are_converted_once_and_stay_in_place(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the address of the float32 copy; its contents follow the weights."""
    sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16), requires_grad=False)
    layer = make_layer(config, "layer", sinks=sinks)
    builder = make_builder(config, ["layer"])
    common = make_common([2, 1], [20, 33])
    seen = []
    run = BatchAttention.run

    def record(self: BatchAttention, *args: Any, **named: Any) -> Any:
        seen.append((named["sinks"].data_ptr(), named["sinks"].dtype, named["sinks"].tolist()))
        return run(self, *args, **named)

    monkeypatch.setattr(BatchAttention, "run", record)
    with torch.inference_mode():
        for value in (1.0, 1.0, 2.5):
            sinks.fill_(value)
            _attend(layer, builder.build(0, common))
        copied = layer.impl._sinks._version
        builder.build(0, common)
        assert layer.impl._sinks._version == copied, "converted again, and nothing had changed"
    assert len({address for address, _, _ in seen}) == 1
    assert [(dtype, values) for _, dtype, values in seen] == [
        (torch.float32, [value] * HEADS) for value in (1.0, 1.0, 2.5)
    ]
    sinks.data = torch.full_like(sinks, -3.0)
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl._sinks.tolist() == [-3.0] * HEADS


def test_micro_batches_are_refused(config: Any) -> None:
    make_layer(config, "layer")
    config.parallel_config.use_ubatching = True
    with pytest.raises(NotImplementedError, match="micro-batches"):
        make_builder(config, ["layer"])


def test_the_block_size_is_the_groups(config: Any, plans: list[dict[str, Any]]) -> None:
    make_layer(config, "layer")
    make_builder(config, ["layer"]).build(0, make_common([1], [5]))
    assert plans[0]["table"].page_size == BLOCK
