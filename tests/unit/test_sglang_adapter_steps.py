# SPDX-License-Identifier: Apache-2.0
"""The back end over SGLang's own layers and pools: every step against the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cpu import Shape

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_step import STEPS, Engine, run_all

from fi_backend.core.counters import counters
from fi_backend.errors import PlanError

CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "plain": (Shape(), {}),
    "a window in one layer": (Shape(windows=(20, -1)), {}),
    "a window of the own key alone": (Shape(windows=(0, 63)), {}),
    "cap": (Shape(cap=3.0), {}),
    "sinks": (Shape(windows=(30, -1)), {"sinks": True}),
    "bfloat16": (Shape(dtype="bfloat16", kv_dtype="bfloat16"), {}),
    "float16, another size of V": (
        Shape(dtype="float16", kv_dtype="float16", head_dim=48, head_dim_v=24),
        {},
    ),
    "fp8": (Shape(kv_dtype="float8_e4m3fn"), {}),
    "fp8 e5m2 with scales": (Shape(kv_dtype="float8_e5m2"), {"scale": 0.25}),
    "hybrid pool": (Shape(windows=(20, -1, 35), hybrid=True), {}),
    "hybrid pool, sinks, fp8": (
        Shape(windows=(20, -1), hybrid=True, kv_dtype="float8_e4m3fn"),
        {"sinks": True},
    ),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", CASES)
def test_steps_against_the_oracle(name: str, page_size: int) -> None:
    shape, options = CASES[name]
    run_all(Engine(Shape(**{**vars(shape), "page_size": page_size}), **options))


def test_a_layer_that_reads_what_another_wrote() -> None:
    engine = Engine(Shape(page_size=16))
    for mode, lengths in STEPS:
        batch = engine.step(mode, lengths)
        engine.backend.init_forward_metadata(batch)
        engine.check_layer(engine.layers[0], batch)
        engine.check_layer(engine.layers[0], batch, save=False)


def test_counts() -> None:
    before = counters().snapshot()
    engine = Engine(Shape(windows=(20, -1, 20)))
    run_all(engine)
    after = counters().snapshot()
    tokens = sum(sum(lengths) for _, lengths in STEPS)
    assert after.layers - before.layers == 3
    assert after.steps - before.steps == len(STEPS)
    assert after.plans - before.plans == 2 * len(STEPS), "layers of one kind share a plan"
    assert after.attention_calls - before.attention_calls == 3 * len(STEPS)
    assert after.tokens - before.tokens == after.appended_tokens - before.appended_tokens == 3 * tokens
    assert after.engine.startswith("sglang 0.5.")


def test_no_table_is_copied() -> None:
    engine = Engine(Shape())
    batch = engine.step(*STEPS[0])
    engine.backend.init_forward_metadata(batch)
    table = engine.backend._step.tables[False]
    assert table.indices.data_ptr() == engine.runner.req_to_token_pool.req_to_token.data_ptr()


def test_an_idle_step_is_no_step() -> None:
    engine = Engine(Shape())
    before = counters().snapshot().steps
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    engine.backend.init_forward_metadata(batch)
    q = torch.zeros(0, 128)
    assert engine.backend.forward(q, None, None, engine.layers[0], batch).shape == (0, 128)
    assert counters().snapshot().steps == before


def test_a_call_without_a_plan() -> None:
    engine = Engine(Shape())
    batch = engine.step(*STEPS[0])
    with pytest.raises(PlanError, match="init_forward_metadata"):
        engine.check_layer(engine.layers[0], batch)


def test_deterministic_inference_is_batch_invariant() -> None:
    """A request's rows have equal bits alone, beside others and in other chunks."""
    shape, tokens = Shape(width=4096, slots=8192), 2700
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(tokens, *size, generator=random) for size in ((128,), (2, 32), (2, 32)))

    def rows_of(*steps: tuple[int, ...]) -> torch.Tensor:
        engine = Engine(shape, enable_deterministic_inference=True, max_prefill_tokens=4096)
        done, found = 0, []
        for lengths in steps:
            batch = engine.step(ForwardMode.EXTEND, lengths)
            engine.backend.init_forward_metadata(batch)
            others, own = lengths[0], slice(done, done + lengths[1])
            given = [
                torch.cat([torch.randn(others, *x.shape[1:], generator=random), x[own]]) for x in (q, k, v)
            ]
            found.append(engine.backend.forward(*given, engine.layers[0], batch)[others:])
            done += lengths[1]
        return torch.cat(found)

    alone = rows_of((0, tokens, 0))
    others = (rows_of((2000, 2600, 0), (1, 100, 0)), rows_of((0, 1, 0), (700, tokens - 1, 0)))
    assert all(torch.equal(alone, other) for other in others)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_mode_reaches_the_kernels(deterministic: bool) -> None:
    engine = Engine(Shape(windows=(20, -1)), enable_deterministic_inference=deterministic)
    run_all(engine)
    specs = [kind.spec for kind in engine.backend._layers._attention]
    assert [spec.batch_invariant for spec in specs] == [deterministic] * 2
