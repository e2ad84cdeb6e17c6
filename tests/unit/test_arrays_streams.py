# SPDX-License-Identifier: Apache-2.0
"""fi_backend.arrays on streams of a CUDA device whose driver is ours: what waits for what, and captures."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_driver_fake import (
    DeviceArray,
    FakeDriver,
    Kernel,
    contents,
    index_arrays,
    inputs,
    planned,
)

from fi_backend.arrays import PageTable, view
from fi_backend.arrays.cuda import CudaStep
from fi_backend.arrays.library import stream_handle
from fi_backend.core.jit.ffi import tvm_ffi
from fi_backend.errors import PlanError


def test_another_stream_waits_for_the_upload(driver: FakeDriver) -> None:
    step = CudaStep(size=8, max_requests=1, index=0)
    step.order(7)
    assert driver.log == []
    step.publish(index_arrays(1), stream=5)
    step.order(5)
    step.order(7)
    assert [entry for entry in driver.log if entry[0] == "hold"] == [("hold", 7, 1)]


def test_uploads_and_launches_follow_each_other(driver: FakeDriver) -> None:
    """A plan is not overwritten under a launch, nor scratch memory shared by two, on whatever streams."""
    step = CudaStep(size=8, max_requests=1, index=0)
    first, second, launched = 1, 2, 5  # events
    step.publish(index_arrays(1), stream=5)
    for stream in (5, 6, 6, 7):
        step.order(stream)
        step.launched(stream)
    step.publish(index_arrays(1), stream=5)
    assert driver.log == [
        *(("copy", 5), ("record", first, 5), ("record", launched, 5)),
        *(("hold", 6, launched), ("record", launched, 6), ("record", launched, 6)),
        *(("hold", 7, launched), ("record", launched, 7)),
        *(("hold", 5, launched), ("copy", 5), ("record", second, 5)),
    ]


def test_streams_of_any_library() -> None:
    assert stream_handle(7) == 7
    assert stream_handle(SimpleNamespace(ptr=8)) == 8
    assert stream_handle(SimpleNamespace(cuda_stream=9)) == 9
    assert stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 10), ptr=8)) == 10
    with pytest.raises(
        TypeError, match=r"^stream: expected an int or an object with __cuda_stream__; got str"
    ):
        stream_handle("7")


def test_a_call_is_queued_on_the_callers_stream(driver: FakeDriver, kernel: Kernel) -> None:
    table = DeviceArray(np.array([[3, 1], [0, -1]], np.int32), 1)
    attention = planned(table)
    assert kernel.prepared == 1
    q, k, v, out = inputs()
    assert attention.run(q, k, v, out=out, stream=6) is out
    assert kernel.streams == [6]
    assert [array.streams for array in (q, k, v, out)] == [[6]] * 4
    assert table.streams[-1] == 5
    *inner, num_ctas, written, lse = kernel.calls[0]
    assert num_ctas == 132
    assert lse is None
    assert written.data_ptr() == out.array.ctypes.data
    assert inner[4].data_ptr() == table.array.ctypes.data
    np.testing.assert_array_equal(contents(inner[3]), [0, 1, 3])
    np.testing.assert_array_equal(contents(inner[5]), [0, 2])
    np.testing.assert_array_equal(contents(inner[6]), [2, 4])
    np.testing.assert_array_equal(contents(inner[7]), [20, 3])
    # The upload was on another stream, and nobody knows on which one the result is read.
    order = [entry for entry in driver.log if entry[0] in ("hold", "synchronize")]
    assert order[-2:] == [("hold", 6, 1), ("synchronize", 6)]
    assert tvm_ffi().get_raw_stream(tvm_ffi().device("cuda", 1)) == 0
    assert attention.run(q, k, v, out=out) is out
    assert q.streams[-1] == 1  # DLPack's number of CUDA's default stream
    assert kernel.streams[-1] == 0


def test_a_captured_call_keeps_its_arrays(driver: FakeDriver, kernel: Kernel) -> None:
    attention = planned(DeviceArray(np.array([[3, 1], [0, -1]], np.int32), 1))
    driver.capturing = {6}
    with pytest.raises(PlanError, match=r"^plan\(\): expected a call outside of the capture"):
        attention.plan(
            np.array([0, 1, 3], np.int32),
            PageTable.ragged(np.array([0, 4, 8], np.int32)),
            stream=6,
        )
    memory = []
    for _ in range(2):
        q, k, v, out = inputs()
        memory += [array.array.ctypes.data for array in (q, k, v, out)]
        attention.run(q, k, v, out=out, stream=6)
        kernel.calls.clear()
        del q, k, v, out
    gc.collect()
    held = [part for call in attention._captured for part in (*call[0], call[1])]
    assert set(memory) <= {part.data_ptr() for part in held if hasattr(part, "data_ptr")}


def test_a_capture_waits_for_no_work_outside_of_it(
    driver: FakeDriver, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU such a wait ended the capture: dependency created on uncaptured work in another stream."""
    attention = planned(DeviceArray(np.array([[3, 1], [0, -1]], np.int32), 1), stream=5)
    driver.capturing = {6, 7}
    for current, told in ((0, -1), (6, -1), (8, -1), (7, 6)):  # 7: another stream of the graph
        monkeypatch.setattr(view, "current_stream", lambda _, current=current: current)
        arrays = inputs()
        noted = len(driver.log)
        attention.run(*arrays[:3], out=arrays[3], stream=6)
        assert driver.log[noted:] == []
        assert [array.streams for array in arrays] == [[told]] * 4
    driver.capturing = set()
    q, k, v, out = inputs()
    attention.run(q, k, v, out=out, stream=6)
    assert q.streams == [6]
    assert ("hold", 6, 1) in driver.log
