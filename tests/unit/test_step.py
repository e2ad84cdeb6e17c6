# SPDX-License-Identifier: Apache-2.0
"""Saved steps: what goes in comes out, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.step import Step, load_step, save_step

GOOD: dict[str, Any] = {
    "qo_indptr": [0, 1, 3],
    "kv_lens": [10, 6],
    "page_size": 4,
    "num_qo_heads": 2,
    "num_kv_heads": 1,
    "block_table": [[7, 3, 9], [7, 5]],
}
SPEC = AttentionSpec(8, 2, 64, page_size=4, window_left=100, batch_invariant=True)


def test_round_trip(tmp_path: Path) -> None:
    step = Step(**GOOD, window_left=5, causal=False, num_ctas=3, head_dim=64, device="cuda", tiles=(16, 128))
    save_step(tmp_path / "s.json", step)
    again = load_step(tmp_path / "s.json")
    assert again.qo_indptr.tolist() == [0, 1, 3]
    assert again.kv_lens.dtype == np.int32
    assert (again.window_left, again.causal, again.num_ctas, again.head_dim) == (5, False, 3, 64)
    assert again.block_table == [[7, 3, 9], [7, 5]]
    assert (again.device, again.tiles) == ("cuda", (16, 128))
    assert again.num_pages.tolist() == [3, 2]
    assert again.q_lens.tolist() == [1, 2]


def test_a_file_by_hand_needs_the_lengths_only(tmp_path: Path) -> None:
    document = {name: value for name, value in GOOD.items() if name != "block_table"}
    (tmp_path / "s.json").write_text(json.dumps(document))
    step = load_step(tmp_path / "s.json")
    assert (step.block_table, step.causal, step.window_left) == (None, True, -1)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"qo_indptr": [0, 1]}, ValueError, "qo_indptr: expected 3 entries, one more than kv_lens; got 2"),
        ({"qo_indptr": [0, 3, 1]}, ValueError, "qo_indptr: expected a non-decreasing sequence from 0"),
        ({"qo_indptr": [1, 2, 3]}, ValueError, "qo_indptr: expected a non-decreasing sequence from 0"),
        ({"qo_indptr": "abc"}, TypeError, "qo_indptr: expected a vector of integers"),
        ({"kv_lens": [10, -1]}, ValueError, "kv_lens: expected >= 0"),
        ({"kv_lens": [10, 2**31]}, ValueError, "kv_lens: expected 32-bit integers"),
        ({"kv_lens": [10.5, 1]}, TypeError, "kv_lens: expected a vector of integers"),
        ({"kv_lens": [[10], [1, 2]]}, TypeError, "kv_lens: expected a vector of integers"),
        ({"page_size": "4"}, TypeError, "page_size: expected an int; got '4'"),
        ({"page_size": 0}, ValueError, "page_size: expected >= 1; got 0"),
        ({"page_size": 2**31}, ValueError, r"page_size: expected < 2\^31; got 2147483648"),
        ({"block_table": [[7, 3, 9]]}, ValueError, "block_table: expected 2 rows"),
        ({"block_table": [7, 3]}, TypeError, "block_table: expected a list of lists"),
        ({"block_table": [[7, 3], [7, 5]]}, ValueError, r"block_table\[0\]: expected at least 3 pages"),
        ({"block_table": [[7, 3, -9], [7, 5]]}, ValueError, r"block_table\[0\]: expected page ids >= 0"),
        ({"block_table": [[7, 3, 9], [7, 2**31]]}, ValueError, r"block_table\[1\]: expected page ids >= 0"),
        ({"device": "tpu"}, ValueError, "device: expected cpu or cuda; got 'tpu'"),
        ({"tiles": 16}, TypeError, "tiles: expected the least and the greatest height; got 16"),
        ({"tiles": [[16], 128]}, TypeError, r"tiles: expected the least and the greatest height; got \[\["),
        ({"colour": 1}, ValueError, "colour: expected one of"),
        ({"format": "other"}, ValueError, "format: expected 'fi_backend step 1'; got 'other'"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, change: dict[str, Any], error: type, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(error, match=f"^{path}: {text}"):
        load_step(path)


def test_missing_fields_and_broken_json_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"kv_lens": [1]}')
    with pytest.raises(ValueError, match="num_kv_heads: expected a value; the file has none"):
        load_step(path)
    for content, error in (("[1]", TypeError), ("{", ValueError), ("[" * 200_000, ValueError)):
        path.write_text(content)
        with pytest.raises(error, match=str(path)):
            load_step(path)


def test_capture_of_a_strided_block_table() -> None:
    # Rows of a wider table, as engines slice theirs; entries past the length are garbage.
    wide = torch.full((2, 8), -77, dtype=torch.int32)
    wide[0, :3] = torch.tensor([7, 3, 9])
    wide[1, :2] = torch.tensor([7, 5])
    table = PageTable.from_block_table(wide[:, :4], torch.tensor([10, 6], dtype=torch.int32), page_size=4)
    step = Step.capture(SPEC, torch.tensor([5, 6, 8], dtype=torch.int32), table, num_ctas=9)
    assert step.block_table == [[7, 3, 9], [7, 5]]
    assert step.qo_indptr.tolist() == [0, 1, 3]
    assert (step.num_qo_heads, step.num_kv_heads, step.head_dim) == (8, 2, 64)
    assert (step.window_left, step.batch_invariant, step.num_ctas) == (100, True, 9)


def test_capture_of_a_token_table_divides_slots() -> None:
    slots = torch.zeros(3, 12, dtype=torch.int32)
    for page, begin in ((6, 0), (2, 4), (11, 8)):
        slots[2, begin : begin + 4] = page * 4 + torch.arange(4, dtype=torch.int32)
    table = PageTable.from_token_table(
        slots, torch.tensor([2]), torch.tensor([9], dtype=torch.int32), page_size=4
    )
    step = Step.capture(SPEC, torch.tensor([0, 1], dtype=torch.int32), table)
    assert step.block_table == [[6, 2, 11]]


def test_capture_of_contiguous_kv_has_no_pages() -> None:
    table = PageTable.ragged(torch.tensor([0, 5, 9]))
    step = Step.capture(AttentionSpec(8, 2, 64), torch.tensor([0, 1, 2], dtype=torch.int32), table)
    assert step.block_table is None
    assert step.kv_lens.tolist() == [5, 4]


def test_capture_leaves_out_requests_that_fill_a_step_up() -> None:
    kv_lens = torch.tensor([10, 0, 6, 0, 0], dtype=torch.int32)
    table = PageTable.from_block_table(torch.ones(5, 3, dtype=torch.int32), kv_lens, page_size=4)
    step = Step.capture(SPEC, torch.tensor([0, 1, 1, 2, 2, 2], dtype=torch.int32), table)
    assert step.qo_indptr.tolist() == [0, 1, 1, 2]
    assert step.kv_lens.tolist() == [10, 0, 6]
    assert step.block_table == [[1, 1, 1], [], [1, 1]]
    none = PageTable.from_block_table(torch.ones(1, 3, dtype=torch.int32), kv_lens[1:2], page_size=4)
    assert Step.capture(SPEC, torch.tensor([3, 3], dtype=torch.int32), none).block_table == []


def test_pages_that_a_window_has_left_may_be_given_up() -> None:
    table = PageTable.from_block_table(
        torch.tensor([[-1, 3, 9]], dtype=torch.int32), torch.tensor([10], dtype=torch.int32), page_size=4
    )
    starts = torch.tensor([0, 1], dtype=torch.int32)
    assert Step.capture(SPEC, starts, table).block_table == [[0, 3, 9]]
    with pytest.raises(ValueError, match=r"block_table\[0\]: expected page ids >= 0"):
        Step.capture(AttentionSpec(8, 2, 64, page_size=4), starts, table)


def test_a_row_that_is_too_short_is_named() -> None:
    memory = torch.arange(9, dtype=torch.int32)
    kv_lens = torch.tensor([10, 6], dtype=torch.int32)
    starts, ends = torch.tensor([0, 7]), torch.tensor([2, 9])
    with pytest.raises(ValueError, match=r"block_table\[0\]: expected at least 3 pages .* got 2"):
        Step.capture(
            SPEC, torch.tensor([0, 1, 2], dtype=torch.int32), PageTable(memory, starts, ends, kv_lens, 4)
        )
