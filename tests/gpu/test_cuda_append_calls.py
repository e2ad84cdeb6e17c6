# SPDX-License-Identifier: Apache-2.0
"""How append_kv behaves as a call on CUDA: streams, graphs, devices, debug mode, errors."""

from __future__ import annotations

import math

import pytest
import torch
from append_caches import caches, full, storage_bytes
from append_pairs import CUDA, on_cuda, on_host
from numeric import assert_bitwise_equal
from torch import Tensor

from fi_backend.core.append import append_kv

pytestmark = pytest.mark.gpu

CYCLES = 200_000_000  # about 0.1 s of torch.cuda._sleep


def test_debug_mode_names_the_slot_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    k_cache, v_cache = caches("separate", 4, 8, 2, (16, 16), (torch.float32,) * 2, CUDA)
    x = torch.ones(3, 2, 16, device=CUDA)
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    for bad in (32, -2):
        with pytest.raises(ValueError, match=rf"slot_mapping\[1\].*0\.\.31.*got {bad}") as raised:
            append_kv(x, x, k_cache, v_cache, torch.tensor([0, bad, 1], device=CUDA))
        assert "-1 (skip)" in str(raised.value)
    assert (storage_bytes(k_cache).view(torch.float32) == 1.5).all()
    append_kv(x, x, k_cache, v_cache, torch.tensor([0, -1, 1], device=CUDA))
    assert (k_cache[0, :2] == 1).all()


@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_captured_append_reads_new_slots_and_scales(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FI_BACKEND_DEBUG", debug)
    random = torch.Generator().manual_seed(0)
    key, value = torch.zeros(2, 9, 2, 64, dtype=torch.bfloat16, device=CUDA)
    slots = torch.full((9,), -1, device=CUDA)
    scale = torch.ones(2, device=CUDA)
    dtypes = (torch.float8_e5m2, torch.float8_e5m2)
    actual = caches("heads first", 4, 8, 2, (64, 64), dtypes, CUDA)
    expected = caches("heads first", 4, 8, 2, (64, 64), dtypes)
    on_cuda(key, value, *actual, slots, k_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(key, value, *actual, slots, k_scale=scale)
    for step in range(4):
        new = [torch.randn(9, 2, 64, generator=random).bfloat16() for _ in "kv"]
        new_slots = torch.randperm(32, generator=random)[:9]
        new_slots[step] = -1
        new_scale = torch.rand(2, generator=random) + 0.5
        for to, x in zip((key, value, slots, scale), (*new, new_slots, new_scale), strict=True):
            to.copy_(x)
        graph.replay()
        on_host(*new, *expected, new_slots, k_scale=new_scale)
        assert torch.equal(storage_bytes(actual[0]), storage_bytes(expected[0])), f"replay {step}"


def test_a_scale_first_seen_while_capturing_is_right_before_any_replay() -> None:
    cache, other = (full((4, 8, 2, 64), torch.bfloat16, CUDA) for _ in range(2))
    x, slots = torch.randn(9, 2, 64, device=CUDA), torch.arange(9, device=CUDA)
    append_kv(x, x, cache, cache, slots)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_kv(x, x, cache, cache, slots, k_scale=0.8125, v_scale=0.8125)
    append_kv(x, x, other, other, slots, k_scale=0.8125, v_scale=0.8125)
    # A division by a number is a multiplication by its reciprocal to torch on CUDA.
    expected = (x.cpu() / torch.tensor([0.8125])).bfloat16()
    assert_bitwise_equal("eager", other.flatten(0, 1)[:9].cpu(), expected)
    graph.replay()
    assert_bitwise_equal("replayed", cache.flatten(0, 1)[:9].cpu(), expected)


def test_the_call_neither_waits_nor_allocates_and_uses_the_current_stream() -> None:
    """Behind a sleeping kernel: an append on another stream would read the old keys."""
    k_cache, v_cache = caches("separate", 4, 8, 2, (64, 64), (torch.bfloat16,) * 2, CUDA)
    slots = torch.arange(9, device=CUDA)
    x, new = torch.zeros(9, 2, 64, device=CUDA), torch.randn(9, 2, 64, device=CUDA)
    append_kv(x, x, k_cache, v_cache, slots)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            x.copy_(new)
            append_kv(x, x, k_cache, v_cache, slots)
            waited = stream.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not waited, "the call waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    stream.synchronize()
    assert_bitwise_equal("k_cache", k_cache.flatten(0, 1)[:9].cpu(), new.bfloat16().cpu())
    assert_bitwise_equal("v_cache", v_cache.flatten(0, 1)[:9].cpu(), new.bfloat16().cpu())


def test_key_and_value_of_one_dtype_take_one_launch() -> None:
    k_cache, v_cache = caches("packed", 4, 8, 2, (128, 64), (torch.float8_e4m3fn,) * 2, CUDA)
    key, value = (torch.randn(9, 2, dim, device=CUDA) for dim in (128, 64))
    slots = torch.arange(9, device=CUDA)
    append_kv(key, value, k_cache, v_cache, slots)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        append_kv(key, value, k_cache, v_cache, slots)
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("append_kernel" in name for name in on_device) == 1, on_device


def test_pages_beyond_32_bits_of_elements() -> None:
    stride = 3 * 2**30
    if torch.cuda.mem_get_info()[0] < 2 * (2 * stride + 64) + 2**30:
        pytest.skip("needs 14 GB of device memory")
    storage = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=CUDA)
    cache = storage.as_strided((3, 4, 1, 16), (stride, 16, 16, 1))
    cache[2] = 0
    key = torch.randn(1, 1, 16, device=CUDA)
    append_kv(key, key, cache, cache, torch.tensor([2 * 4 + 3], device=CUDA))
    assert_bitwise_equal("cache", cache[2, 3].cpu(), key[0].bfloat16().cpu())
    assert not cache[2, :3].any()


def test_tensors_of_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    k_cache, v_cache = caches("separate", 4, 8, 2, (64, 64), (torch.bfloat16,) * 2, "cuda:1")
    x = torch.randn(9, 2, 64, device="cuda:1")
    append_kv(x, x, k_cache, v_cache, torch.arange(9, device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert_bitwise_equal("k_cache", k_cache.flatten(0, 1)[:9].cpu(), x.bfloat16().cpu())


def test_append_inside_a_compiled_function() -> None:
    key, value = torch.randn(5, 2, 64, device=CUDA), torch.randn(5, 2, 48, device=CUDA)
    slots = torch.tensor([3, -1, 20, 0, 31], device=CUDA)
    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
        k, v = caches("separate", 4, 8, 2, (64, 48), (torch.float8_e4m3fn,) * 2, CUDA)

        def append(k: Tensor, v: Tensor) -> Tensor:
            append_kv(key * 2, value, k, v, slots, k_scale=0.5)
            return k.float().sum()

        results.append((wrap(append)(k, v).cpu(), k.cpu(), v.cpu()))
    for name, traced, eager in zip(("sum", "k_cache", "v_cache"), results[1], results[0], strict=True):
        assert_bitwise_equal(name, traced, eager)
    assert math.isfinite(results[0][0])


@pytest.mark.parametrize("name", ["key", "value", "k_cache", "v_cache", "slot_mapping", "k_scale", "v_scale"])
def test_a_tensor_of_another_device_is_named(name: str) -> None:
    k_cache, v_cache = caches("separate", 4, 8, 2, (16, 16), (torch.float32,) * 2, CUDA)
    arguments = {
        "key": torch.ones(3, 2, 16, device=CUDA),
        "value": torch.ones(3, 2, 16, device=CUDA),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "slot_mapping": torch.arange(3, device=CUDA),
        "k_scale": torch.ones(1, device=CUDA),
        "v_scale": torch.ones(2, device=CUDA),
    }
    arguments[name] = arguments[name].cpu()
    with pytest.raises(ValueError, match="host memory") as raised:
        append_kv(**arguments)
    # The first argument tells the device; when it is the odd one, the next one is found not to be there.
    assert str(raised.value).startswith("k_cache" if name == "key" else name)
    assert "cuda:0" in str(raised.value)
    assert (k_cache == 1.5).all(), "written in spite of the error"
