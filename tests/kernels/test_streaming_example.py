# SPDX-License-Identifier: Apache-2.0
"""The StreamingLLM example: which tokens are kept, and keys rotated by their places among these."""

from __future__ import annotations

import json
import math
from pathlib import Path

import example_modules
import pytest
from stream_batch import PAGE, SINKS, WINDOW, StreamBatch, streaming


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_versions_step_by_step(dtype: str) -> None:
    """Prompts of different lengths, chunks, then tokens one by one until every page has been taken again."""
    stream = StreamBatch(dtype)
    for counts in ((13, 2), (5, 9), *[(1, 1)] * 30, (0, 3), (6, 0)):
        stream.step(counts)
    assert len(stream.keys[0]) > 3 * stream.pages.capacity


def test_pages_roll_and_sinks_stay() -> None:
    pages = streaming.RollingPages(1, page_size=PAGE, sink_pages=SINKS, window_pages=WINDOW)
    first = pages.append([16])
    assert first.tolist() == list(range(16))
    assert pages.append([1]).tolist() == [4]  # the oldest page of the window is taken again
    assert pages.table.tolist() == [[0, 2, 3, 1]]
    assert pages.kv_lens.tolist() == [13]
    pages.append([8])
    assert pages.table.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"^counts\[0\]: expected at most 9 tokens at once; got 10"):
        pages.append([10])
    with pytest.raises(ValueError, match=r"^counts: expected 1 requests; got 2"):
        pages.append([1, 1])
    with pytest.raises(ValueError, match=r"^window_pages: expected 1 or more; got 0"):
        streaming.RollingPages(1, page_size=PAGE, sink_pages=SINKS, window_pages=0)


def test_the_measurement_runs(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    example_modules.run(
        "streaming_llm/measure",
        *("--lengths", "64", "--runs", "2", "--heads", "4", "2", "--head-dim", "32", "--dtype", "float32"),
        *("--eager", "--json", str(record)),
    )
    [row] = json.loads(record.read_text())["rows"]
    assert row["length"] == 64
    assert all(math.isfinite(row[name]) and row[name] > 0 for name in ("fused_us", "unfused_us", "ratio"))
    assert row["error"] < 1e-4
