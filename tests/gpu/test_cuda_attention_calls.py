# SPDX-License-Identifier: Apache-2.0
"""How plan() and run() behave as calls on CUDA: plans in flight, streams, devices, torch.compile, errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS
from gpu_device import device, int32, no_waiting, occupy, on_cuda, only_on_cuda, starts_of, synchronize
from gpu_specs import MODULES, spec
from numeric import assert_bitwise_equal
from serving_step import STEPS, Serving, Step
from torch import Tensor

from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.support import unsupported_reason
from fi_backend.errors import PlanError, UnsupportedError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def eager(engine: Serving, step: Step, attn: BatchAttention | None = None) -> tuple[Tensor, Tensor]:
    """The results of a step with nothing else under way."""
    attn = attn or engine.attention(costs=SPLIT_COSTS)
    engine.fill(step)
    engine.plan(attn, step)
    synchronize()
    engine.run(attn)
    return engine.results()


@pytest.mark.parametrize("module", ["128", "invariant e4m3 128"])
@pytest.mark.parametrize("busy", [0, 30], ids=["free stream", "busy stream"])
def test_fifty_plans_in_flight_do_not_race(module: str, busy: int) -> None:
    """Every step has tensors of its own, and nobody waits between them."""
    engine = Serving(spec(module, 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    names = [list(STEPS)[n * 5 % len(STEPS)] for n in range(50)]
    expected = {name: eager(engine, STEPS[name]) for name in set(names)}
    inputs, outs = [], []
    for name in names:
        step = STEPS[name]
        starts, kv_lens = step.padded()
        q = torch.full_like(engine.q, math.nan)
        q[: step.tokens] = engine.queries(step).to(device())
        lens = kv_lens.to(device())
        table = PageTable.from_block_table(engine.table.indices, lens, page_size=engine.spec.page_size)
        inputs.append((q, starts.to(device()), table, starts, kv_lens))
        outs.append((torch.full_like(engine.out, math.nan), torch.full_like(engine.lse, math.nan)))
    synchronize()
    with no_waiting():
        occupy(busy)
        for (q, starts, table, host, lens), (out, lse) in zip(inputs, outs, strict=True):
            attn.plan(starts, table, qo_indptr_host=host, kv_lens_host=lens)
            attn.run(q, engine.k, engine.v, out=out, lse=lse)
    for n, (name, (out, lse)) in enumerate(zip(names, outs, strict=True)):
        assert_bitwise_equal(f"out of step {n}, {name}", out.cpu(), expected[name][0])
        assert_bitwise_equal(f"lse of step {n}, {name}", lse.cpu(), expected[name][1])


@pytest.mark.parametrize("on_device", [False, True], ids=["host plan", "device plan"])
def test_a_step_neither_waits_nor_allocates_and_uses_the_current_stream(on_device: bool) -> None:
    """Append, plan and two layers behind a sleeping kernel; another stream would read old lengths."""
    only_on_cuda()
    engine = Serving(spec("128", 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    step, old = STEPS["mixed"], STEPS["decode"]
    expected = eager(engine, step)
    for _ in range(2):
        eager(engine, old, attn)  # loads all modules
        engine.plan(attn, None)
        append_kv(engine.k[0, :1], engine.v[0, :1], engine.k, engine.v, torch.tensor([0], device=device()))
    starts, kv_lens = (x.to(device()) for x in step.padded())
    q = engine.queries(step).to(device())
    key, value = engine.k[0, :4].clone(), engine.v[0, :4].clone()
    slots = torch.arange(4, device=device())
    second, second_lse = torch.empty_like(engine.out), torch.empty_like(engine.lse)
    stream = torch.cuda.Stream()
    synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_waiting(), torch.cuda.stream(stream):
        occupy(100)
        engine.starts.copy_(starts)
        engine.kv_lens.copy_(kv_lens)
        engine.q[: step.tokens].copy_(q)
        engine.q[step.tokens :].fill_(math.nan)
        engine.out.fill_(math.nan)
        engine.lse.fill_(math.nan)
        append_kv(key, value, engine.k, engine.v, slots)
        engine.plan(attn, None if on_device else step)
        attn.run(engine.q, engine.k, engine.v, out=second, lse=second_lse)
        engine.run(attn)
        waited = stream.query()
    assert not waited, "the step waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    stream.synchronize()
    for name, actual, wanted in zip(("out", "lse"), engine.results(), expected, strict=True):
        assert_bitwise_equal(name, actual, wanted)
    assert_bitwise_equal("first layer", second[: step.tokens].cpu(), expected[0][: step.tokens])


def test_a_layer_is_one_launch_and_copies_nothing_to_the_host() -> None:
    only_on_cuda()
    engine = Serving(spec("128", 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    eager(engine, STEPS["mixed"], attn)
    engine.plan(attn, None)
    engine.fill(STEPS["mixed"])
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for planned in (STEPS["mixed"], None):
            engine.plan(attn, planned)
            engine.run(attn)
        synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("attention_kernel" in name for name in names) == 2, names
    assert sum("HtoD" in name for name in names) == 1, names
    assert not [name for name in names if "DtoH" in name]
    assert len(names) <= 5, names


def test_tensors_of_a_device_that_is_not_the_current_one() -> None:
    if not on_cuda() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    layer = spec("128", 8, 2)
    results = []
    for place in ("cuda:0", "cuda:1"):
        random = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(500, h, 128, generator=random).bfloat16().to(place) for h in (8, 2, 2))
        attn = BatchAttention(
            layer, max_requests=2, max_tokens=101, max_kv_len=400, device=place, num_ctas=48
        )
        starts, lens = int32(0, 100, 101), int32(100, 400)
        table = PageTable.ragged(int32(0, 100, 500).to(place))
        for host in ({"qo_indptr_host": starts, "kv_lens_host": lens}, {}):
            attn.plan(starts.to(place), table, **host)
            out = attn.run(q[:101], k, v)
            assert out.device == torch.device(place)
            results.append(out.cpu())
    assert torch.cuda.current_device() == 0
    for other in results[1:]:
        assert_bitwise_equal("out", other, results[0])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("module", ["128", "e4m3 128"])
def test_append_and_attention_inside_a_compiled_function(module: str) -> None:
    engine = Serving(spec(module, 8, 2))
    attn = engine.attention(costs=SPLIT_COSTS)
    step = STEPS["mixed"]
    slots = torch.arange(4, device=device())
    key, value = torch.randn(2, 4, 2, 128, device=device())
    history = engine.k.clone(), engine.v.clone()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        append_kv(key * 2, value, k, v, slots)
        return attn.run(q * 0.5, k, v, k_scale=0.5, v_scale=2.0) + 1

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        for _ in range(2):
            engine.fill(step)
            engine.plan(attn, step)
            k, v = (x.clone() for x in history)
            results.append(function(engine.q[: step.tokens], k, v).cpu())
    assert not results[0].isnan().any()
    for other in results[1:]:
        assert_bitwise_equal("out", other, results[0])


def misaligned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor that starts one element behind a 16-byte border."""
    count = math.prod(shape)
    memory = torch.zeros(count + 16 // dtype.itemsize, dtype=dtype, device=device())
    return memory[1 : 1 + count].view(shape)


def bad_strides(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of a head that are one element apart from a multiple of 16 bytes."""
    return torch.zeros(*shape[:-1], shape[-1] + 1, dtype=dtype, device=device())[..., : shape[-1]]


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out"])
@pytest.mark.parametrize("make", [misaligned, bad_strides])
@pytest.mark.parametrize("module", ["64", "e4m3 64"])
def test_tensors_off_the_16_byte_grid_are_refused(name: str, make: Any, module: str) -> None:
    only_on_cuda()
    engine = Serving(spec(module, 8, 2))
    attn = engine.attention()
    engine.fill(STEPS["decode"])
    engine.plan(attn, STEPS["decode"])
    arguments = {"q": engine.q, "k_cache": engine.k, "v_cache": engine.v, "out": engine.out}
    arguments[name] = make(tuple(arguments[name].shape), arguments[name].dtype)
    with pytest.raises(ValueError, match=rf"^{name}: expected a start and strides that are multiples of 16"):
        attn.run(**arguments)
    assert engine.out.isnan().all(), "written in spite of the error"


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "out", "lse", "k_scale", "v_scale", "sinks"])
def test_a_tensor_of_the_host_is_named(name: str) -> None:
    only_on_cuda()
    engine = Serving(spec("64", 8, 2, sinks=True))
    attn = engine.attention()
    engine.fill(STEPS["decode"])
    engine.plan(attn, STEPS["decode"])
    arguments: dict[str, Tensor] = {
        "q": engine.q,
        "k_cache": engine.k,
        "v_cache": engine.v,
        "out": engine.out,
        "lse": engine.lse,
        "k_scale": torch.ones(2, device=device()),
        "v_scale": torch.ones(1, device=device()),
        "sinks": torch.zeros(8, device=device()),
    }
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match=rf"^{name}: expected .*host memory"):
        attn.run(**arguments)
    assert engine.out.isnan().all(), "written in spite of the error"


def test_plans_of_wrong_places_are_refused() -> None:
    only_on_cuda()
    engine = Serving(spec("64", 8, 2))
    attn = engine.attention()
    starts, lens = STEPS["decode"].padded()
    with pytest.raises(PlanError, match=r"^qo_indptr: expected device cuda:0; got cpu"):
        attn.plan(starts, engine.table, qo_indptr_host=starts, kv_lens_host=lens)
    with pytest.raises(PlanError, match=r"^kv_lens_host: expected a host tensor"):
        attn.plan(engine.starts, engine.table, qo_indptr_host=starts)
    with pytest.raises(PlanError, match=r"^kv_lens"):
        attn.plan(engine.starts, engine.table, qo_indptr_host=starts, kv_lens_host=lens + 2000)
    with pytest.raises(PlanError, match=r"^run\(\): expected plan\(\)"):
        engine.run(attn)
    queues = engine.attention(planned_queues=True)
    with pytest.raises(PlanError, match=r"^planned_queues: expected False"):
        queues.plan(engine.starts, engine.table)
    masked = BatchAttention(
        spec("mask 128", 4, 2), max_requests=1, max_tokens=1, max_kv_len=16, device=device()
    )
    table = PageTable.ragged(int32(0, 1).to(device()))
    with pytest.raises(PlanError, match=r"^qo_indptr_host, kv_lens_host: expected both with a custom mask"):
        masked.plan(starts_of((1,)).to(device()), table, custom_mask=torch.ones(1, dtype=torch.bool))


UNSUPPORTED = {
    "float32": ({"dtype": "float32"}, "^dtype: on CUDA expected float16 or bfloat16; got float32"),
    "72": ({"head_dim": 72}, r"^head_dim, head_dim_v: on CUDA expected one of 64, .*; got 72, 72"),
    "64x128": ({"head_dim": 64, "head_dim_v": 128}, "^head_dim, head_dim_v: .*; got 64, 128"),
    "512": ({"head_dim": 512}, "^head_dim, head_dim_v: .*; got 512, 512"),
    "mixed": ({"dtype": "bfloat16", "kv_dtype": "float16"}, "^kv_dtype: on CUDA expected .*; got float16"),
    "group": ({"num_qo_heads": 65}, "^num_qo_heads: on CUDA expected at most 64.*; got 65"),
}


@pytest.mark.parametrize(("change", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_does_not_exist_is_refused_before_anything_is_compiled(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("compiled or loaded a module")

    layer = AttentionSpec(**({"num_qo_heads": 4, "num_kv_heads": 1, "head_dim": 64} | change))
    reason = unsupported_reason(layer, "cuda")
    assert reason is not None
    assert re.search(message, reason)
    monkeypatch.setattr("fi_backend.core.jit.load", load)
    with pytest.raises(UnsupportedError, match=message):
        BatchAttention(layer, max_requests=1, max_tokens=1, max_kv_len=1, device="cuda")


def test_every_module_of_these_tests_is_supported() -> None:
    assert not [name for name in MODULES if unsupported_reason(spec(name, 4, 2), "cuda")]
