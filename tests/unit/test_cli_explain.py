# SPDX-License-Identifier: Apache-2.0
"""`fi-backend explain`: matrix, tree and loads against examples worked out by hand."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fi_backend.cli.explain_model import FULL, PARTIAL, SHARED, Explanation, explain_step
from fi_backend.cli.main import app
from fi_backend.core.planner import CostModel
from fi_backend.core.step import Step, save_step

RUN = CliRunner()


def hand_step(num_kv_heads: int = 1) -> Step:
    """Pages of 4: request 0 decodes its 10th token, request 1 computes tokens 4 and 5; page 7 is shared."""
    return Step(
        qo_indptr=np.array([0, 1, 3]),
        kv_lens=np.array([10, 6]),
        page_size=4,
        num_qo_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        block_table=[[7, 3, 9], [7, 5]],
    )


def explain(step: Step, num_ctas: int = 2, **options: bool) -> Explanation:
    return explain_step(step, num_ctas=num_ctas, costs=CostModel(), **options)


def test_matrix_by_hand() -> None:
    matrix = explain(hand_step()).matrix
    # Request 1 ends where the shared run ends, so it comes first; columns are pages in order of first use.
    assert [(tile.request, tile.q_rows, tile.height) for tile in matrix.tiles] == [(1, 4, 16), (0, 2, 16)]
    assert matrix.pages.tolist() == [7, 5, 3, 9]
    assert matrix.image(10, 10).tolist() == [
        [SHARED, PARTIAL, 0, 0],  # token 4 does not see token 5 of page 5
        [SHARED, 0, FULL, PARTIAL],  # page 9 holds 2 of 4 tokens
    ]


def test_matrix_with_a_window_by_hand() -> None:
    step = Step(
        qo_indptr=np.array([0, 1]),
        kv_lens=np.array([18]),
        page_size=4,
        num_qo_heads=1,
        num_kv_heads=1,
        window_left=7,
        block_table=[[5, 4, 3, 2, 1]],
    )
    matrix = explain(step).matrix
    # The query stands at 17 and sees 10..17: page 3 from its third token on, page 2, half of page 1.
    blocks = dict(zip(matrix.pages[matrix.column].tolist(), matrix.kind.tolist(), strict=True))
    assert blocks == {3: PARTIAL, 2: FULL, 1: PARTIAL}


def test_matrix_of_a_prefill_is_a_staircase() -> None:
    step = Step(
        qo_indptr=np.array([0, 8]), kv_lens=np.array([8]), page_size=2, num_qo_heads=32, num_kv_heads=1
    )
    # 8 tokens x 32 heads are two tiles of 128 rows, 4 tokens each.
    image = explain(step).matrix.image(10, 10)
    assert image.tolist() == [[PARTIAL, PARTIAL, 0, 0], [FULL, FULL, PARTIAL, PARTIAL]]


def test_reduced_image_keeps_the_strongest_kind() -> None:
    matrix = explain(hand_step()).matrix
    assert matrix.image(1, 2).tolist() == [[SHARED, FULL]]
    assert matrix.image(2, 1).tolist() == [[SHARED], [SHARED]]


def test_tree_by_hand() -> None:
    explanation = explain(hand_step())
    assert explanation.tree is not None
    # Computed and full: pages 7 and 3 of request 0 (9 tokens), page 7 of request 1 (4 tokens).
    [root] = explanation.tree.roots
    assert (root.begin, root.end, root.requests, root.children) == (0, 4, [0, 1], [])
    assert explanation.tree.own == [(4, 8), (4, 4)]
    assert explanation.order == [1, 0]


def test_loads_by_hand() -> None:
    # cost = alpha * 16 + beta * KV tokens = 16 + 4 * 10 = 56 and 16 + 4 * 6 = 40, for each KV head.
    two = explain(hand_step(), num_ctas=2).loads
    assert two.total.tolist() == [56, 40]
    assert two.imbalance == pytest.approx(56 / 48)
    three = explain(hand_step(num_kv_heads=2), num_ctas=3).loads
    assert [pairs.tolist() for pairs in three.tickets] == [[[0, 0]], [[0, 1]], [[1, 0], [1, 1]]]
    assert three.total.tolist() == [56, 56, 80]
    assert three.by_tile.tolist() == [[0, 56, 0, 0, 0], [0, 56, 0, 0, 0], [0, 80, 0, 0, 0]]
    idle = explain(hand_step(), num_ctas=5).loads
    assert idle.total.tolist() == [56, 40, 0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), max_size=12),
    ctas=st.integers(1, 150),
    window=st.sampled_from([-1, 0, 100]),
    invariant=st.booleans(),
)
def test_any_step_is_accounted_for(
    lens: list[tuple[int, int]], ctas: int, window: int, invariant: bool
) -> None:
    kv_lens = np.array([kv for kv, _ in lens], np.int32)
    q_lens = [min(q, kv) for kv, q in lens]
    step = Step(
        qo_indptr=np.cumsum([0, *q_lens]),
        kv_lens=kv_lens,
        page_size=16,
        num_qo_heads=8,
        num_kv_heads=2,
        window_left=window,
        batch_invariant=invariant,
    )
    drawn, queued = explain(step, ctas), explain(step, ctas, planned_queues=True)
    items = drawn.plan.items
    assert int(drawn.loads.total.sum()) == 2 * int(items["cost"].sum())
    assert sum(len(pairs) for pairs in drawn.loads.tickets) == 2 * len(items)
    # With costs as estimated, drawing by ticket and Algorithm 1 assign alike.
    assert [p.tolist() for p in drawn.loads.tickets] == [p.tolist() for p in queued.loads.tickets]
    # A visible pair of tokens needs its block, and a block needs a visible pair.
    seen = {(int(r), int(c)) for r, c in zip(drawn.matrix.row, drawn.matrix.column, strict=True)}
    assert len(seen) == drawn.matrix.row.size
    first_page = np.cumsum([0, *step.num_pages.tolist()])
    expected = set()
    for index, tile in enumerate(drawn.matrix.tiles):
        kv, q = int(kv_lens[tile.request]), q_lens[tile.request]
        positions = kv - q + np.arange(tile.q_begin // 4, (tile.q_begin + tile.q_rows - 1) // 4 + 1)
        keys = np.arange(kv)
        visible = keys <= positions[:, None]
        if window >= 0:
            visible &= positions[:, None] - keys <= window
        for page in np.unique(keys[visible.any(0)] // 16):
            expected.add(
                (index, int(np.flatnonzero(drawn.matrix.pages == first_page[tile.request] + page)[0]))
            )
    assert seen == expected


def test_text_shows_the_numbers(tmp_path: Path) -> None:
    save_step(tmp_path / "step.json", hand_step())
    result = RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--ctas", "2"])
    assert result.exit_code == 0
    out = result.stdout
    assert "2 requests, 3 query tokens, 16 KV tokens; 2/1 heads, page 4" in out
    assert "2 query tiles × 4 pages, 5 blocks" in out
    assert re.search(r"^r1 q 0-1 \(16\): 1 +▓░··$", out, re.MULTILINE)
    assert re.search(r"^r0 q 0 \(16\): 1 +▓·█░$", out, re.MULTILINE)
    assert "4 of 16 KV tokens are shared copies (25%)" in out
    assert "2 requests × 4 tokens (requests 0-1)" in out
    assert "max/mean 1.04, 2 CTAs" in out
    assert "mean 192, min 184, max 200" in out


def prefix_step() -> Step:
    """32 decoding requests behind one text of 2000 pages, in four groups of 500 more."""
    group = [list(range(2000 * g, 2000 * g + 500)) for g in range(1, 5)]
    rows = [[*range(2000), *group[r % 4], 10_000 + 2 * r, 10_001 + 2 * r] for r in range(32)]
    return Step(
        qo_indptr=np.arange(33),
        kv_lens=np.full(32, 2500 * 16 + 20),
        page_size=16,
        num_qo_heads=32,
        num_kv_heads=8,
        block_table=rows,
    )


def test_prefixes_as_text(tmp_path: Path) -> None:
    save_step(tmp_path / "step.json", prefix_step())
    out = RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--prefix"]).stdout
    assert "Block-sparse" not in out
    assert "CTA loads" not in out
    # 31 copies of 32000 tokens, and 7 of 8000 in each group.
    assert "1216000 of 1280640 KV tokens are shared copies (95%)" in out
    assert re.search(r"● 32 requests × 32000 tokens \(requests 0-31\) by 1 tile$", out, re.MULTILINE)
    assert re.search(
        r"● 8 requests × 8000 tokens \(requests 0, 4, 8, 12, 16, 20, …\) by 1 tile$", out, re.MULTILINE
    )
    assert "16 tokens (request 3)" in out
    assert "read for each KV head: 1280640 KV tokens flat, 64640 with 5 levels (95% less)" in out
    # 2 * 128 elements of two bytes and 8 KV heads are 4096 bytes a token.
    assert "5.25 GB flat, 265 MB with levels; 4.98 GB saved" in out


def test_prefixes_that_do_not_pay_or_may_not(tmp_path: Path) -> None:
    save_step(tmp_path / "step.json", hand_step())
    out = RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--prefix"]).stdout
    assert "○ 2 requests × 4 tokens (requests 0-1)" in out
    assert "16 KV tokens flat, 16 with 0 levels (0% less)" in out
    save_step(tmp_path / "step.json", replace(prefix_step(), window_left=100))
    out = RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--prefix"]).stdout
    assert "nothing is read once: window_left: " in out
    assert "○ 32 requests × 32000 tokens" in out
    assert "needs page ids" in RUN.invoke(app, ["explain", "--kv-lens", "9,9", "--prefix"]).stdout


def test_lengths_and_block_table_from_the_command_line(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    table.write_text(json.dumps([[7, 3, 9], [7, 5]]))
    lengths = ["--kv-lens", "10,6", "--q-lens", "1,2", "--heads", "2", "--kv-heads", "1", "--page-size", "4"]
    without = RUN.invoke(app, ["explain", *lengths, "--ctas", "2"]).stdout
    assert "2 query tiles × 5 pages" in without
    assert "needs page ids" in without
    both = RUN.invoke(app, ["explain", *lengths, "--ctas", "2", "--block-table", str(table)]).stdout
    save_step(tmp_path / "step.json", hand_step())
    assert both == RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--ctas", "2"]).stdout


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[[7, 3, 9]]", "--block-table: expected 2 rows, one a request; got 1"),
        ("[[7, 3], [7, 5]]", "--block-table[0]: expected at least 3 pages of 4 tokens for kv_len 10; got 2"),
        ("[[7, 3, -1], [7, 5]]", "--block-table[0]: expected page ids >= 0"),
        ('{"a": 1}', "--block-table: expected a list of lists"),
        ("[[7", "--block-table: expected a JSON list of lists"),
    ],
)
def test_bad_block_tables(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "table.json").write_text(content)
    arguments = ["--kv-lens", "10,6", "--page-size", "4", "--block-table", str(tmp_path / "table.json")]
    result = RUN.invoke(app, ["explain", *arguments])
    assert result.exit_code == 2
    assert text in result.stderr


def test_more_than_can_be_drawn_is_refused() -> None:
    result = RUN.invoke(app, ["explain", "--kv-lens", "2147483000"])
    assert "--kv-lens: expected at most 4194304 pages of 16 tokens to draw" in result.stderr


def test_options_reach_the_plan() -> None:
    def first_lines(*options: str) -> str:
        lengths = ["--kv-lens", "9000,40", "--ctas", "8", "--heads", "4", "--kv-heads", "4"]
        return RUN.invoke(app, ["explain", *lengths, *options]).stdout

    assert "window 100" in first_lines("--window", "100")
    assert "batch-invariant (grid 512)" in first_lines("--batch-invariant")
    assert "queues of Algorithm 1" in first_lines("--planned-queues")
    assert first_lines("--costs", "cpu") != first_lines()


@pytest.mark.parametrize("lens", ["0", "1", ",".join(["37"] * 256), "0,5,0"])
def test_odd_batches_as_text_and_picture(tmp_path: Path, lens: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    result = RUN.invoke(app, ["explain", "--kv-lens", lens, "--out", str(out), "--text"])
    assert result.exit_code == 0, result.stderr
    assert f"wrote {out}" in result.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


def test_svg_says_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_step(tmp_path / "step.json", hand_step())
    out = tmp_path / "x.svg"
    assert (
        RUN.invoke(app, ["explain", "--step", str(tmp_path / "step.json"), "--out", str(out)]).exit_code == 0
    )
    text = out.read_text()
    for label in (
        "Block-sparse matrix: 2 query tiles × 4 pages, 5 blocks",
        "request 1, q 0–1 (16): 1",
        "Prefix tree: 4 of 16 KV tokens are shared copies (25%)",
        "CTA loads, longest first to whoever is free:",
        "max/mean",
        "full block, page shared by requests",
    ):
        assert label in text


def test_a_picture_in_an_unknown_format(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["explain", "--kv-lens", "5", "--out", str(tmp_path / "x.bmp")])
    assert result.exit_code == 2
    assert "--out: expected a file that ends in .svg, .png, .pdf" in result.stderr


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = RUN.invoke(app, ["explain", "--kv-lens", "5", "--out", str(tmp_path / "x.png")])
    assert result.exit_code == 2
    assert "pip install 'fi-backend[plot]'" in result.stderr
    assert RUN.invoke(app, ["explain", "--kv-lens", "5"]).exit_code == 0
