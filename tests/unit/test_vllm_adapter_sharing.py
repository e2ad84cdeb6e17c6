# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes under vLLM: found in the step's block table, read once, counted; and when not."""

from __future__ import annotations

import logging
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_step import BLOCK, make_builder, make_common, make_layer, outputs, roomy_config, shared_step

from fi_backend.adapters import shared_counts
from fi_backend.adapters.vllm import metadata
from fi_backend.adapters.vllm.translate import sharing_limits, step_limits
from fi_backend.core.attention import BatchAttention
from fi_backend.core.counters import counters
from fi_backend.core.share_tally import Saved
from fi_backend.core.sharing import SharingLimits

NAMES = "shared_plans", "prefix_nodes", "kv_tokens_saved", "kv_bytes_saved"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    return roomy_config(monkeypatch)


class Plans:
    """Arguments of every plan, and what was planned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, run: bool = True) -> None:
        self.detect: list[bool] = []
        self.on_device: list[bool] = []
        self.nodes: list[int] = []
        original = BatchAttention.plan

        def plan(self_: BatchAttention, *args: Any, **named: Any) -> Any:
            self.detect.append(named["detect_prefixes"])
            self.on_device.append(named["kv_lens_host"] is None)
            assert (named["kv_lens_host"] is None) == (named["qo_indptr_host"] is None)
            if run:
                made = original(self_, *args, **named)
                self.nodes.append(made.num_nodes)
                return made
            return None

        monkeypatch.setattr(BatchAttention, "plan", plan)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(monkeypatch)


def counted(before: Any) -> tuple[int, ...]:
    after = asdict(counters().snapshot())
    return tuple(after[name] - asdict(before)[name] for name in NAMES)


def test_capacity_for_speculation_and_short_questions(config: Any) -> None:
    config.scheduler_config.max_num_batched_tokens = 8192
    assert sharing_limits(config, step_limits(config)) == SharingLimits(16, 3, 16 + 256)
    config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    assert sharing_limits(config, step_limits(config)) == SharingLimits(16, 3, 64 + 256)


@pytest.mark.parametrize("q_len", [1, 4])
def test_shared_blocks_are_read_once(
    config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans, q_len: int
) -> None:
    layer = make_layer(config, "layer")
    before = counters().snapshot()
    composed = outputs(config, layer, shared_step(q_len=q_len))
    # Twelve requests of up to four tokens and two heads a KV head fill one query tile.
    saved = 11 * 120 * BLOCK
    assert counted(before) == (1, 1, saved, saved * 2 * 2 * 32 * 4)
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "sharing")
    flat = outputs(config, layer, shared_step(q_len=q_len))
    assert plans.nodes == [1, 0]
    assert plans.detect == [True, False]
    assert counted(before)[0] == 1
    torch.testing.assert_close(composed, flat, rtol=1e-5, atol=1e-5)
    assert not composed.isnan().any()


def test_blocks_that_another_row_writes_in_this_step(config: Any, plans: Plans) -> None:
    """The row that computes them reads them through its mask; rows that found them in the cache share."""
    layer = make_layer(config, "layer")
    common = shared_step(12)
    tokens = 120 * BLOCK + 50
    config.scheduler_config.max_num_batched_tokens = 4096
    starts = torch.tensor([0, tokens, *(tokens + 1 + r for r in range(11))], dtype=torch.int32)
    common.query_start_loc = common.query_start_loc_cpu = starts
    common.num_actual_tokens = int(starts[-1])
    common.seq_lens[0] = tokens  # all of its tokens are new
    table = common.block_table_tensor
    table[0, 120:] = torch.arange(500, 504)
    before = counters().snapshot()
    composed = outputs(config, layer, common)
    assert counted(before)[:3] == (1, 1, 10 * 120 * BLOCK)
    config.cache_config.enable_prefix_caching = False
    torch.testing.assert_close(composed, outputs(config, layer, common), rtol=1e-5, atol=1e-5)
    assert plans.nodes == [1, 0]


def test_what_is_never_shared(config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans) -> None:
    config.speculative_config = SimpleNamespace(num_speculative_tokens=1)
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    builder.build_for_cudagraph_capture(shared_step())
    builder.build_for_drafting(shared_step(), 1)
    builder.build(0, shared_step(requests=1))
    with monkeypatch.context() as patch:
        patch.setattr(metadata.compat, "kv_len_bounds", lambda *_, **__: None)
        builder.build(0, shared_step())
    assert plans.detect == [False] * 4

    config.cache_config.enable_prefix_caching = False
    assert all(each.tally is None for each in make_builder(config, ["layer"]).attention.values())


def test_layers_with_windows_stay_flat(config: Any, plans: Plans) -> None:
    make_layer(config, "global")
    make_layer(config, "local", sliding_window=64)
    make_builder(config, ["global", "local"]).build(0, shared_step())
    assert (plans.detect, plans.nodes) == ([True, False], [1, 0])


def test_dummy_steps_longer_than_any_request_are_not_searched(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_layer(config, "layer")
    plans = Plans(monkeypatch, run=False)
    make_builder(config, ["layer"]).build(0, shared_step(max_seq_len=4097))
    assert plans.detect == [False]


def test_on_a_gpu_the_device_finds_and_plans(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host lengths may be upper bounds there, and runner V2 keeps the block table on the device alone."""
    make_layer(config, "global")
    make_layer(config, "local", sliding_window=64)
    builder = make_builder(config, ["global", "local"])
    monkeypatch.setattr(builder, "_on_host", False)
    plans = Plans(monkeypatch, run=False)
    builder.build(0, shared_step())
    builder.build(0, shared_step(requests=1))
    builder.build_for_cudagraph_capture(shared_step())
    assert plans.on_device == [True, False, False, False, False, False]
    assert plans.detect == [True, False, False, False, False, False]


def test_the_first_sharing_is_logged_once(
    config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    monkeypatch.setattr(shared_counts, "_reported", False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="vllm.plugins.fi_backend"):
        for _ in range(3):
            builder.build(0, shared_step())
    (line,) = [record.getMessage() for record in caplog.records if "prefixes" in record.getMessage()]
    assert f"{11 * 120 * BLOCK} KV tokens a layer less in 1 steps" in line


def test_counts_that_come_back_later(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a GPU, whose counts are known some steps after the plan."""
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    (attention,) = builder.attention.values()
    given = iter([(0, 0, 0), (0, 0, 0), (16, 32, 1000), (0, 0, 0)])
    tally = SimpleNamespace(take=lambda: Saved(*next(given)), add=lambda _: None)
    monkeypatch.setattr(attention, "tally", tally)
    before = counters().snapshot()
    for _ in range(4):
        builder.build(0, make_common([1], [5]))
    assert counted(before) == (16, 32, 1000, 1000 * 2 * 2 * 32 * 4)
