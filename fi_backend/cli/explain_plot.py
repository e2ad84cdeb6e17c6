# SPDX-License-Identifier: Apache-2.0
"""`explain` as a picture: matrix above, prefix tree and CTA loads below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fi_backend.cli.explain_model import EMPTY, FULL, PARTIAL, SHARED, Explanation
from fi_backend.cli.explain_tree_plot import draw_tree
from fi_backend.cli.shell import InputError

FORMATS = (".svg", ".png", ".pdf")
# Okabe and Ito's palette: distinct for every kind of colour vision, and of different lightness in print.
KIND_COLOURS = {EMPTY: "#f4f4f4", PARTIAL: "#a6cfe8", FULL: "#0072b2", SHARED: "#d55e00"}
KIND_LABELS = {
    FULL: "full block",
    PARTIAL: "partly masked block",
    SHARED: "full block, page shared by requests",
}
TILE_COLOURS = ("#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7")
TILE_HEIGHTS = (1, 16, 32, 64, 128)
_MAX_ROWS, _MAX_COLUMNS = 1200, 2000
_LABELLED_ROWS = 24


def save_picture(explanation: Explanation, path: Path) -> None:
    """Draw into `path`, whose suffix chooses the format; InputError if it is not one of FORMATS."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--out: expected a file that ends in {', '.join(FORMATS)}; got {str(path)!r}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            f"--out: expected matplotlib; got {error}. Run pip install 'fi-backend[plot]', or use --text"
        ) from error

    tree = explanation.tree is not None
    rows = len(explanation.matrix.tiles)
    upper = float(np.clip(1.6 + 0.22 * min(rows, _LABELLED_ROWS), 2.6, 5.5))
    # Text stays text in an SVG: it can be searched and takes the viewer's font.
    with rc_context(
        {"svg.fonttype": "none", "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left"}
    ):
        figure = Figure(figsize=(12, upper + 4.2), layout="constrained")
        figure.get_layout_engine().set(hspace=0.06, wspace=0.04, w_pad=0.08, h_pad=0.08)
        mosaic = [["matrix", "matrix"], ["tree", "loads"]] if tree else [["matrix"], ["loads"]]
        axes = figure.subplot_mosaic(mosaic, height_ratios=[upper, 3.6])
        _draw_matrix(axes["matrix"], explanation)
        _draw_loads(axes["loads"], explanation)
        if explanation.tree is not None:
            draw_tree(axes["tree"], explanation, explanation.tree)
        figure.suptitle(headline(explanation), x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(path, dpi=130)


def headline(explanation: Explanation) -> str:
    """The step in one line."""
    step, header = explanation.step, explanation.plan.header
    text = (
        f"{counted(step.kv_lens.size, 'request')}, {counted(int(step.qo_indptr[-1]), 'query token')}, "
        f"{counted(int(step.kv_lens.sum()), 'KV token')}; "
        f"{step.num_qo_heads}/{step.num_kv_heads} heads, page {step.page_size}"
    )
    if step.window_left >= 0:
        text += f", window {step.window_left}"
    if header["invariant_grid"]:
        text += f", batch-invariant (grid {header['invariant_grid']})"
    return text


def counted(number: int, noun: str) -> str:
    """The number with its noun in the right form: 1 page, 2 pages."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _draw_matrix(axis: Any, explanation: Explanation) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    matrix = explanation.matrix
    tiles, columns = len(matrix.tiles), len(matrix.pages)
    image = matrix.image(_MAX_ROWS, _MAX_COLUMNS)
    if image.size:
        axis.imshow(
            image,
            cmap=ListedColormap([KIND_COLOURS[kind] for kind in (EMPTY, PARTIAL, FULL, SHARED)]),
            vmin=0,
            vmax=3,
            aspect="auto",
            interpolation="nearest",
            extent=(0, columns, tiles, 0),
        )
    if tiles <= 60 and columns <= 150:
        axis.set_xticks(range(columns + 1), minor=True)
        axis.set_yticks(range(tiles + 1), minor=True)
        axis.grid(which="minor", color="white", linewidth=1)
        axis.tick_params(which="minor", length=0)
    if tiles <= _LABELLED_ROWS:
        axis.set_yticks([i + 0.5 for i in range(tiles)], [_tile_label(explanation, i) for i in range(tiles)])
        axis.tick_params(axis="y", length=0)
        axis.set_ylabel("tile (height): work items")
    else:
        axis.set_ylabel("query tiles" + (", in the tree's order" if explanation.tree is not None else ""))
    if columns <= 32:
        axis.set_xticks([i + 0.5 for i in range(columns)], [str(page) for page in matrix.pages])
        axis.tick_params(axis="x", length=0)
        axis.set_xlabel("page id, in order of first use")
    else:
        axis.set_xlabel("pages, in order of first use")
    kinds = [kind for kind in (FULL, PARTIAL, SHARED) if (matrix.kind == kind).any()]
    axis.legend(
        handles=[Patch(facecolor=KIND_COLOURS[kind], label=KIND_LABELS[kind]) for kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3,
        frameon=False,
        borderaxespad=0.2,
        handlelength=1.2,
    )
    axis.set_title(
        f"Block-sparse matrix: {counted(tiles, 'query tile')} × {counted(columns, 'page')}, "
        f"{counted(matrix.row.size, 'block')}"
    )
    for side in axis.spines.values():
        side.set_visible(False)


def _tile_label(explanation: Explanation, index: int) -> str:
    tile = explanation.matrix.tiles[index]
    group = explanation.step.num_qo_heads // explanation.step.num_kv_heads
    begin, end = tile.q_begin // group, (tile.q_begin + tile.q_rows - 1) // group
    tokens = f"q {begin}" if begin == end else f"q {begin}–{end}"
    return f"request {tile.request}, {tokens} ({tile.height}): {len(tile.chunks)}"


def _draw_loads(axis: Any, explanation: Explanation) -> None:
    loads = explanation.loads
    ctas = np.arange(len(loads.costs))
    bottom = np.zeros(len(ctas))
    # Gaps narrower than a pixel would come and go from bar to bar.
    width = 0.86 if len(ctas) <= 48 else 1.0
    for column, height in enumerate(TILE_HEIGHTS):
        cost = loads.by_tile[:, column]
        if cost.any():
            axis.bar(
                ctas, cost, bottom=bottom, width=width, color=TILE_COLOURS[column], label=f"tile {height}"
            )
            bottom += cost
    _mark_tickets(axis, explanation, width)
    mean = float(loads.total.mean())
    axis.axhline(mean, color="black", linewidth=1, linestyle="--", label="mean")
    axis.set_xlim(-0.6, len(ctas) - 0.4)
    axis.set_ylim(0, max(float(loads.total.max()), 1.0) * 1.04)
    axis.set_xlabel("CTA")
    axis.set_ylabel("cost (planner's units)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    how = "queues of Algorithm 1" if explanation.plan.queues else "longest first to whoever is free"
    axis.set_title(f"CTA loads, {how}:\nmax/mean {loads.imbalance:.2f}")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=6, frameon=False, handlelength=1.2)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _mark_tickets(axis: Any, explanation: Explanation, width: float) -> None:
    """Separate the tickets of each bar, where there are few enough to see."""
    loads = explanation.loads
    if max(len(cost) for cost in loads.costs) > 40:
        return
    for cta, (pairs, costs) in enumerate(zip(loads.tickets, loads.costs, strict=True)):
        # Bars are stacked by tile height, so the borders have to be as well.
        order = np.argsort(explanation.plan.items["tile_log2"][pairs[:, 0]], kind="stable")
        borders = np.cumsum(costs[order])[:-1]
        axis.hlines(borders, cta - width / 2, cta + width / 2, color="white", linewidth=0.6)
