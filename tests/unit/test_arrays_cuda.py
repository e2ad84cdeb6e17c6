# SPDX-License-Identifier: Apache-2.0
"""fi_backend.arrays on a CUDA device whose driver is ours: addresses, uploads, order, lifetimes."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest
from cuda_driver_fake import (
    SPEC,
    DeviceArray,
    FakeDriver,
    Kernel,
    contents,
    index_arrays,
    inputs,
    planned,
)

from fi_backend.arrays import (
    AttentionSpec,
    BatchAttention,
    PageTable,
    PrefixForest,
    SharingLimits,
)
from fi_backend.arrays.cuda import CudaPlace, CudaStep
from fi_backend.errors import PlanError, UnsupportedError


def test_a_step_is_uploaded_to_addresses_that_stay(driver: FakeDriver) -> None:
    step = CudaStep(size=100, max_requests=5, index=1)
    addresses = set()
    for requests in (3, 5, 0, 3):
        memory, buffer = step.host()
        assert memory.shape == (100,)
        assert buffer.data_ptr() == memory.ctypes.data
        memory[:] = requests + 1
        arrays = index_arrays(requests)
        views = step.publish(arrays, stream=9)
        assert (contents(step.plan) == requests + 1).all()
        for view, array in zip((step.plan, *views), (memory, *arrays), strict=True):
            assert view.__dlpack_device__() == (2, 1)
            assert view.data_ptr() % 16 == 0
            assert view.shape == array.shape
            assert str(view.dtype) == str(array.dtype)
            np.testing.assert_array_equal(contents(view), array)
        addresses.add((step.plan.data_ptr(), *(view.data_ptr() for view in views)))
    assert len(addresses) == 1


def test_a_slot_is_written_again_once_its_copy_is_through(driver: FakeDriver) -> None:
    step = CudaStep(size=8, max_requests=1, index=0)
    for _ in range(6):
        step.host()
        step.publish(index_arrays(1), stream=5)
    kinds = [entry for entry in driver.log if entry[0] != "copy"]
    records = [("record", event, 5) for event in (1, 2, 3, 4)]
    assert kinds == [*records, ("wait", 1), records[0], ("wait", 2), records[1]]


def test_memory_is_freed_when_its_last_view_goes(driver: FakeDriver) -> None:
    here = CudaPlace(0)
    assert here.workers() == 132
    assert here.arch == "sm_90a"
    before = len(driver.memory)
    scratch = here.empty(1000)
    assert scratch.shape == (1000,)
    source = np.arange(6, dtype=np.float32).reshape(2, 3)
    constant = here.constant(source[:, ::-1])
    np.testing.assert_array_equal(contents(constant), source[:, ::-1])
    again = constant
    del constant, scratch
    gc.collect()
    assert len(driver.memory) == before + 1
    np.testing.assert_array_equal(contents(again), source[:, ::-1])
    del again
    gc.collect()
    assert len(driver.memory) == before


def test_a_new_scale_is_no_part_of_a_capture(driver: FakeDriver) -> None:
    here = CudaPlace(0)
    one = here.scale(1.0)
    driver.capturing = {3}
    assert here.scale(1.0, 3) is one
    with pytest.raises(UnsupportedError, match=r"^k_scale, v_scale: .*before the capture.*got 0\.5"):
        here.scale(0.5, 3)
    driver.capturing = set()
    np.testing.assert_array_equal(contents(here.scale(0.5, 3)), [0.5])


def test_a_device_that_is_not_there(driver: FakeDriver) -> None:
    with pytest.raises(UnsupportedError, match=r"^device: expected a CUDA device that exists; got cuda:2"):
        BatchAttention(SPEC, max_requests=1, max_tokens=1, max_kv_len=1, device="cuda:2")


def test_debug_mode_tells_what_a_launch_met(
    driver: FakeDriver, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = planned(DeviceArray(np.array([[3, 1], [0, -1]], np.int32), 1))
    q, k, v, out = inputs()
    at = attention._step.plan.data_ptr() + attention.planner.layout.counters + 4
    ctypes.c_int32.from_address(at).value = 1
    attention.run(q, k, v, out=out)
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    with pytest.raises(ValueError, match=r"^page table: expected page ids inside the KV cache"):
        attention.run(q, k, v, out=out, stream=6)
    assert driver.log[-1] == ("synchronize", 6)
    driver.capturing = {6}
    attention.run(q, k, v, out=out, stream=6)


def test_prefixes_are_not_looked_for_in_a_table_on_the_device(kernel: Kernel) -> None:
    table = PageTable.from_block_table(
        DeviceArray(np.array([[3, 1], [3, 0]], np.int32), 1), np.array([20, 30], np.int32), page_size=16
    )
    limits = {"max_requests": 2, "max_tokens": 4, "max_kv_len": 64, "device": "cuda:1"}
    attention = BatchAttention(SPEC, **limits, sharing=SharingLimits(1, 1, 4))
    starts = np.array([0, 1, 2], np.int32)
    with pytest.raises(
        PlanError, match=r"^page_table: expected a host table, where the lengths are; got one"
    ):
        attention.plan(starts, table, detect_prefixes=True)
    forest = PrefixForest.from_block_table(
        np.array([[3, 1], [3, 0]], np.int32), np.array([16, 16], np.int32), 16
    )
    attention.plan(starts, table, forest=forest)


def test_everything_lies_on_one_device(kernel: Kernel) -> None:
    here = np.array([[3, 1], [0, -1]], np.int32)
    with pytest.raises(PlanError, match=r"^page_table: expected pages on cuda:1; got them on cpu"):
        planned(here)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^page_table: expected pages on cuda:1; got them on cuda:0"):
        planned(DeviceArray(here))
    with pytest.raises(ValueError, match=r"^kv_lens: expected an array in host memory; got one on cuda:1"):
        PageTable.from_block_table(DeviceArray(here, 1), DeviceArray(here[0], 1), page_size=16)
    q, k, v, out = inputs()
    attention = planned(DeviceArray(here, 1))
    with pytest.raises(ValueError, match=r"^q: expected an array on cuda:1; got one on cpu"):
        attention.run(q.array, k, v, out=out)
    with pytest.raises(ValueError, match=r"^v_cache: expected an array on cuda:1; got one on cuda:0"):
        attention.run(q, k, DeviceArray(v.array), out=out)
    with pytest.raises(
        TypeError, match=r"^out: expected an array, since DeviceArray has no __array_namespace__"
    ):
        attention.run(q, k, v)
    assert kernel.calls == []


def test_a_mask_is_uploaded_and_is_no_part_of_a_capture(driver: FakeDriver, kernel: Kernel) -> None:
    spec = AttentionSpec(4, 2, 64, dtype="float16", page_size=16, custom_mask=True)
    attention = BatchAttention(spec, max_requests=2, max_tokens=4, max_kv_len=64, device="cuda:1")
    mask = np.arange(26) % 3 != 0
    table = PageTable.from_block_table(
        DeviceArray(np.array([[3, 1], [0, -1]], np.int32), 1), np.array([20, 3], np.int32), page_size=16
    )
    attention.plan(np.array([0, 1, 3], np.int32), table, custom_mask=mask, stream=5)
    q, k, v, out = inputs()
    attention.run(q, k, v, out=out, stream=5)
    bits, begin, lens, heads = kernel.calls[0][-7:-3]
    packed = [np.packbits(part, bitorder="little") for part in (mask[:20], mask[20:])]
    np.testing.assert_array_equal(contents(bits), np.concatenate(packed))
    np.testing.assert_array_equal(contents(begin), [0, 3])
    np.testing.assert_array_equal(contents(lens), [20, 3])
    assert heads == 1
    driver.capturing = {5}
    with pytest.raises(UnsupportedError, match=r"^custom_mask: a graph would read a mask that the next plan"):
        attention.run(q, k, v, out=out, stream=5)
