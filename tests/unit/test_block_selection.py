# SPDX-License-Identifier: Apache-2.0
"""BlockSelection: which keys the rows of its page table hold, and where their pages are in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import share
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fi_backend.core.block_selection import BlockSelection
from fi_backend.core.head_pages import HeadPages, PageSteps, spec_of_head
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError

MAX_ROWS, BLOCKS = 4, 6


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_of(table: PageTable) -> list[list[tuple[int, int]]]:
    """(page, token of the page) of every key of every row."""
    assert table.indices is not None
    flat = table.indices.as_strided((table.indices.untyped_storage().nbytes() // 4,), (1,))
    found = []
    for row, count in enumerate(table.kv_lens.tolist()):
        begin, end = int(table.row_begin[row]), int(table.row_end[row])
        pages = flat[begin:end].tolist()
        assert count <= len(pages) * table.page_size
        found.append([(pages[t // table.page_size], t % table.page_size) for t in range(count)])
    return found


LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=MAX_ROWS)


@share(100)
@given(
    lens=LENGTHS,
    page_size=st.integers(1, 10),
    num_heads=st.integers(1, 3),
    heads_first=st.booleans(),
    numbers=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_rows_hold_the_chosen_blocks_in_order(
    lens: list[int], page_size: int, num_heads: int, heads_first: bool, numbers: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    rows = len(lens)
    chosen = torch.rand(rows, num_heads, BLOCKS, generator=random) < 0.5
    table = torch.randperm(100, generator=random)[: rows * BLOCKS].view(rows, BLOCKS).int()
    steps = PageSteps(page=7, head=2, num_pages=100, num_kv_heads=num_heads)
    selection = BlockSelection(
        max_rows=MAX_ROWS,
        max_blocks=BLOCKS,
        page_size=page_size,
        num_heads=num_heads,
        heads_first=heads_first,
    )
    selection._table.fill_(10**6)  # what stood there in an earlier step
    if numbers:
        ids = torch.where(chosen, torch.arange(BLOCKS), -1)
        ids = torch.cat(
            (ids, ids[..., :2], torch.full_like(ids[..., :1], BLOCKS + 3)), -1
        )  # repeats, too far
        ids = ids[..., torch.randperm(ids.shape[-1], generator=random)]
        pages = selection.fill_blocks(ids, int32(lens), table, steps)
    else:
        pages = selection.fill_mask(chosen, int32(lens), table, steps)
    expected = []
    for row, length in enumerate(lens):
        for head in range(num_heads):
            tokens = [t for t in range(min(length, BLOCKS * page_size)) if chosen[row, head, t // page_size]]
            places = [(int(table[row, t // page_size]) * 7 + head * 2, t % page_size) for t in tokens]
            expected.append(places)
    if heads_first:
        expected = [expected[row * num_heads + head] for head in range(num_heads) for row in range(rows)]
    assert rows_of(pages) == expected


def test_numbers_that_no_token_has_choose_nothing() -> None:
    """2**62 + 1 times a page size of 4 is 4 in 64 bits, which is a token of block 1."""
    selection = BlockSelection(max_rows=2, max_blocks=3, page_size=4)
    far = torch.tensor([[2**62 + 1, 2], [2**61, 0]])
    assert rows_of(selection.fill_blocks(far, int32([16, 7]))) == [
        [(2, t) for t in range(4)],
        [(0, t) for t in range(4)],
    ]


LAYOUTS = {
    "nhd": lambda x: x,
    "hnd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads outside": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "tokens outside": lambda x: x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),
    "every other page": lambda x: x.repeat_interleave(2, 0)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 4, 3), (5, 4, 1), (1, 1, 1), (5, 1, 2)])
def test_pages_of_one_head(layout: str, shape: tuple[int, int, int]) -> None:
    count, page_size, heads = shape
    k, v = torch.randn(*shape, 8), torch.randn(*shape, 16)
    pages = HeadPages(LAYOUTS[layout](k), LAYOUTS[layout](v))
    steps = pages.steps
    for page in range(count):
        for head in range(heads):
            at = page * steps.page + head * steps.head
            assert torch.equal(pages.k_pages[at, :, 0], k[page, :, head])
            assert torch.equal(pages.v_pages[at, :, 0], v[page, :, head])
    assert len(pages.k_pages) == (count - 1) * steps.page + (heads - 1) * steps.head + 1
    if layout == "nhd":
        assert steps == PageSteps.contiguous(count, page_size, heads)


def test_layouts_that_differ_are_refused() -> None:
    cache = torch.zeros(5, 4, 3, 8)
    with pytest.raises(ValueError, match=r"^v_cache: .* k_cache, 12 : 1; got 3 : 1"):
        HeadPages(cache, LAYOUTS["hnd"](cache))
    with pytest.raises(ValueError, match=r"^v_cache: expected \(5, 4, 3\); got \(5, 4, 2\)"):
        HeadPages(cache, cache[:, :, :2])
    with pytest.raises(ValueError, match=r"^k_cache: expected page and head strides >= 1; got 0"):
        HeadPages(cache[:1].expand(5, -1, -1, -1), cache)
    with pytest.raises(ValueError, match=r"^k_cache: expected \[pages.*got \(0, 4, 3, 8\)"):
        HeadPages(cache[:0], cache[:0])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window_left": 8}, "^window_left: expected -1, .*no positions; got 8"),
        ({"alibi": True}, "^alibi: .*no positions"),
        ({"custom_mask": True}, "^custom_mask: expected False"),
        ({"sinks": True}, "^sinks: .*one value"),
    ],
)
def test_heads_that_choose_refuse_what_needs_positions(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        spec_of_head(AttentionSpec(4, 2, 16, **option), 2)
    assert spec_of_head(AttentionSpec(4, 2, 16), 4).num_qo_heads == 1


def fill(
    choice: Any = None, lens: Any = (30, 30), table: Any = None, pages: Any = None, **sizes: int
) -> None:
    options: dict[str, Any] = {"max_rows": 2, "max_blocks": 2, "page_size": 10} | sizes
    choice = torch.tensor([[True, True, False]] * 2) if choice is None else choice
    selection = BlockSelection(**options)
    how = selection.fill_mask if choice.dtype is torch.bool else selection.fill_blocks
    how(choice, int32(lens), table, pages)


ALL = torch.ones(2, 3, dtype=torch.bool)
STEPS = PageSteps.contiguous(3, 10, 2)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "rows": (lambda: fill(max_rows=0), ValueError, "^max_rows: expected 1 or more; got 0"),
    "dtype": (lambda: fill(torch.ones(2, 3)), TypeError, "^blocks: expected int32 .*float32"),
    "shape": (lambda: fill(ALL[0]), ValueError, r"^mask: expected \[rows, blocks\] or \[rows, 1.*got \(3,\)"),
    "more rows": (lambda: fill(ALL[:1].expand(3, -1)), ValueError, "^mask: expected at most 2 rows; got 3"),
    "too many": (lambda: fill(ALL), ValueError, "^mask: .*max_blocks = 2 blocks; got 3 in row 0"),
    "numbers": (
        lambda: fill(int32([[2, 0, 1], [0, 1, -1]])), ValueError, "^blocks: expected at most max_blocks = 2"
    ),
    "lengths": (lambda: fill(lens=(30, -1)), ValueError, r"^kv_lens: expected lengths >= 0; got \[30, -1\]"),
    "count": (lambda: fill(lens=(30,)), ValueError, r"^kv_lens: expected \[2\]; got \(1,\)"),
    "page": (lambda: fill(table=int32([[0, 1, -1], [0, -1, -1]])), ValueError, "^block_table: .*row 1 of"),
    "table": (lambda: fill(table=torch.zeros(2, 3)), TypeError, "^block_table: expected int32"),
    "no pages": (lambda: fill(num_heads=2), ValueError, "^pages: expected HeadPages of .*got None"),
    "heads": (lambda: fill(num_heads=3, pages=STEPS), ValueError, "^pages: .* 3 KV heads.*got 2"),
    "list": (
        lambda: BlockSelection(max_rows=1, max_blocks=1, page_size=1).fill_blocks([[0]], int32([1])),
        TypeError, "^blocks: expected a torch tensor; got list",
    ),
    "lengths of a list": (
        lambda: BlockSelection(max_rows=1, max_blocks=1, page_size=1).fill_blocks(int32([[0]]), [1]),
        TypeError, "^kv_lens: expected a torch tensor; got list",
    ),
    "pages of another type": (
        lambda: fill(num_heads=2, pages=3), TypeError, "^pages: expected HeadPages or PageSteps; got int"
    ),
    "arrays": (
        lambda: HeadPages(torch.zeros(1, 1, 1, 8).numpy(), torch.zeros(1, 1, 1, 8)),
        TypeError, "^k_cache: expected a torch tensor; got ndarray",
    ),
    "behind": (
        lambda: fill(num_heads=2, pages=STEPS, table=int32([[0, 3, 9]] * 2)), ValueError, "^block_table: "
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused_by_name(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()
