# SPDX-License-Identifier: Apache-2.0
"""FI_BACKEND_WITHOUT under vLLM: each mechanism is left out alone, and answers stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

import vllm_step
from numeric import assert_bitwise_equal
from vllm_step import (
    make_builder,
    make_cache,
    make_common,
    make_layer,
    outputs,
    roomy_config,
    run_step,
    shared_step,
)

from fi_backend.adapters.vllm import metadata
from fi_backend.core.attention import BatchAttention
from fi_backend.core.plan import Plan

# Where a step is planned and with what, by what a GPU would be given.
DEVICE, HOST = "device", "host"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    return roomy_config(monkeypatch)


class Plans:
    """Where each plan was made, whether prefixes were looked for there, and the host's plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, bool]] = []
        self.plans: list[Plan] = []
        original = BatchAttention.plan

        def plan(self_: BatchAttention, *args: Any, **named: Any) -> Any:
            on_device = named["kv_lens_host"] is None
            assert on_device == (named["qo_indptr_host"] is None)
            self.made.append((DEVICE if on_device else HOST, named["detect_prefixes"]))
            made = original(self_, *args, **named)
            self.plans.append(Plan(made.buffer.copy(), self_.planner.layout))
            return made

        monkeypatch.setattr(BatchAttention, "plan", plan)


def gpu_builder(config: Any, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> Any:
    """A builder that takes the CPU for a GPU: plans "on the device" are made here."""
    builder = make_builder(config, names)
    monkeypatch.setattr(builder, "_on_host", False)
    return builder


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(monkeypatch)


@pytest.mark.parametrize(
    ("without", "shared", "alone"),
    [
        ("", (DEVICE, True), (HOST, False)),
        ("sharing", (DEVICE, False), (HOST, False)),
        ("lpt", (DEVICE, True), (HOST, False)),
        ("device_plan", (HOST, False), (HOST, False)),
        ("sharing,device_plan", (HOST, False), (HOST, False)),
    ],
)
def test_each_alone_on_a_gpu(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    plans: Plans,
    without: str,
    shared: tuple[str, bool],
    alone: tuple[str, bool],
) -> None:
    monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
    make_layer(config, "layer")
    builder = gpu_builder(config, monkeypatch, ["layer"])
    builder.build(0, shared_step())
    builder.build(0, shared_step(requests=1))
    assert plans.made == [shared, alone]
    assert [plan.num_nodes > 0 for plan in plans.plans] == ["sharing" not in without, False]


def test_the_host_makes_the_plan_that_the_device_would(
    config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans
) -> None:
    """From the exact lengths, where vLLM's host knows upper bounds; layers with windows keep to these."""
    make_layer(config, "global")
    make_layer(config, "local", sliding_window=64)
    step = shared_step(q_len=2)
    exact = step.seq_lens.clone()
    gpu_builder(config, monkeypatch, ["global", "local"]).build(0, step)
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "device_plan")
    monkeypatch.setattr(metadata.compat, "kv_len_bounds", lambda *_, **__: exact + 100)
    gpu_builder(config, monkeypatch, ["global", "local"]).build(0, step)
    device, _, host, local = plans.plans
    assert host.tobytes() == device.tobytes()
    assert host.kv_len_bounds.tolist() == exact.tolist()
    assert local.kv_len_bounds.tolist() == (exact + 100).tolist()


def test_without_sharing_and_device_plan_nobody_waits(
    config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans
) -> None:
    """The device knows nothing then that the host needs: its own upper bounds make the plan."""
    monkeypatch.setattr(metadata, "copy_lengths", lambda *_: pytest.fail("this waits for the device"))
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "sharing,device_plan")
    make_layer(config, "layer")
    step = shared_step()
    bounds = step.seq_lens + 100
    monkeypatch.setattr(metadata.compat, "kv_len_bounds", lambda *_, **__: bounds)
    gpu_builder(config, monkeypatch, ["layer"]).build(0, step)
    [plan] = plans.plans
    assert plan.kv_len_bounds.tolist() == bounds.tolist()


def test_lengths_that_the_host_does_not_know(
    config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans
) -> None:
    """Of a draft model of runner V2; while a graph is captured nothing can be waited for."""
    monkeypatch.setattr(metadata.compat, "kv_len_bounds", lambda *_, **__: None)
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "device_plan")
    make_layer(config, "layer")
    builder = gpu_builder(config, monkeypatch, ["layer"])
    builder.build_for_drafting(shared_step(), 1)
    assert plans.made == [(HOST, False)]
    monkeypatch.setattr(metadata, "may_wait", lambda _: False)
    builder.build_for_drafting(shared_step(), 1)
    assert plans.made[1:] == [(DEVICE, False)]


def test_items_without_lpt(config: Any, monkeypatch: pytest.MonkeyPatch, plans: Plans) -> None:
    layer = make_layer(config, "layer")
    common = make_common([1, 1, 1], [20, 60, 40])
    ordered = run_step(config, layer, common, make_cache())
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "lpt")
    assert_bitwise_equal("output", run_step(config, layer, common, make_cache()), ordered)
    orders = [list(dict.fromkeys(plan.items["request"].tolist())) for plan in plans.plans]
    assert orders == [[1, 2, 0], [0, 1, 2]]


@pytest.mark.parametrize("without", ["sharing", "lpt", "device_plan"])
def test_answers_stay(config: Any, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    layer = make_layer(config, "layer")
    expected = outputs(config, layer, shared_step())
    monkeypatch.setattr(
        vllm_step, "make_builder", lambda config, names: gpu_builder(config, monkeypatch, names)
    )
    monkeypatch.setenv("FI_BACKEND_WITHOUT", without)
    found = outputs(config, layer, shared_step())
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("without", ["sharing", "lpt", "device_plan"])
def test_memory_stays_as_it_is(config: Any, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    make_layer(config, "layer")
    sizes = []
    for value in ("", without):
        monkeypatch.setenv("FI_BACKEND_WITHOUT", value)
        (attention,) = make_builder(config, ["layer"]).attention.values()
        sizes.append((attention.workspace_size(), attention.planner.capacity))
    assert sizes[0] == sizes[1]


def test_an_unknown_word_stops_the_building_of_the_model(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_layer(config, "layer")
    monkeypatch.setenv("FI_BACKEND_WITHOUT", "share")
    with pytest.raises(ValueError, match=r"FI_BACKEND_WITHOUT: expected any of sharing, lpt, device_plan"):
        make_layer(config, "another", logits_soft_cap=3.0)
