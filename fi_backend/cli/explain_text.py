# SPDX-License-Identifier: Apache-2.0
"""`explain` as text: block characters for the matrix and the loads, a tree for the prefixes."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from fi_backend.cli.explain_model import EMPTY, FULL, PARTIAL, SHARED, Explanation
from fi_backend.cli.explain_plot import counted, headline
from fi_backend.cli.explain_tree_text import print_tree

# Shape tells the kinds apart; colour only repeats it.
_KINDS = {EMPTY: ("·", "dim"), PARTIAL: ("░", "cyan"), FULL: ("█", "blue"), SHARED: ("▓", "dark_orange3")}
_LABEL_WIDTH = 26
_MAX_ROWS = 40
_BAR_ROWS = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print matrix, prefix tree, loads and the counts of the plan."""
    header = explanation.plan.header
    console.print(Text(headline(explanation), style="bold"), soft_wrap=True)
    console.print(
        f"plan: {counted(header['num_items'], 'work item')} × {counted(header['num_kv_heads'], 'KV head')}, "
        f"chunk {header['chunk']} tokens, "
        f"{counted(header['num_units'], 'merge unit')} of {counted(header['num_parts'], 'partial state')}",
        soft_wrap=True,
    )
    console.print()
    _print_matrix(console, explanation)
    console.print()
    print_tree(console, explanation)
    console.print()
    _print_loads(console, explanation)


def print_prefixes(console: Console, explanation: Explanation) -> None:
    """Print the step and its prefix tree."""
    console.print(Text(headline(explanation), style="bold"), soft_wrap=True)
    print_tree(console, explanation)


def _print_matrix(console: Console, explanation: Explanation) -> None:
    matrix = explanation.matrix
    tiles, columns = len(matrix.tiles), len(matrix.pages)
    image = matrix.image(_MAX_ROWS, max(console.width - _LABEL_WIDTH - 1, 16))
    console.print(
        f"[bold]Block-sparse matrix[/bold]: {counted(tiles, 'query tile')} × {counted(columns, 'page')}, "
        f"{counted(matrix.row.size, 'block')}; pages in order of first use\n"
        "█ full  ▓ full, page shared by requests  ░ partly masked",
        soft_wrap=True,
    )
    for index, row in enumerate(image):
        first, last = index * tiles // len(image), max((index + 1) * tiles // len(image) - 1, 0)
        line = Text(_row_label(explanation, first, last).ljust(_LABEL_WIDTH))
        for kind in row.tolist():
            line.append(*_KINDS[kind])
        console.print(line, soft_wrap=True)
    if image.size and image.shape != (tiles, columns):
        per_row, per_column = -(-tiles // image.shape[0]), -(-columns // image.shape[1])
        size = f"{counted(per_row, 'tile')} × {counted(per_column, 'page')}"
        console.print(f"[dim]one character stands for up to {size}[/dim]")


def _row_label(explanation: Explanation, first: int, last: int) -> str:
    tile = explanation.matrix.tiles[first]
    if first != last:
        return f"requests {tile.request}..{explanation.matrix.tiles[last].request}"
    group = explanation.step.num_qo_heads // explanation.step.num_kv_heads
    begin, end = tile.q_begin // group, (tile.q_begin + tile.q_rows - 1) // group
    tokens = f"q {begin}" if begin == end else f"q {begin}-{end}"
    return f"r{tile.request} {tokens} ({tile.height}): {len(tile.chunks)}"


def _print_loads(console: Console, explanation: Explanation) -> None:
    loads = explanation.loads
    total, ctas = loads.total, len(loads.costs)
    how = "queues of Algorithm 1" if explanation.plan.queues else "longest first to whoever is free"
    console.print(
        f"[bold]CTA loads[/bold], {how}: max/mean {loads.imbalance:.2f}, "
        f"{counted(ctas, 'CTA')}, cost in planner's units",
        soft_wrap=True,
    )
    top = max(int(total.max()), 1)
    axis = len(f"{top}")
    width = max(console.width - axis - 2, 8)
    per_column = -(-ctas // width)
    columns = [int(total[i : i + per_column].max()) for i in range(0, ctas, per_column)]
    heights = np.asarray(columns) * (_BAR_ROWS * 8) // top
    for row in reversed(range(_BAR_ROWS)):
        label = str(top) if row == _BAR_ROWS - 1 else "0" if row == 0 else ""
        bars = "".join(_EIGHTHS[int(np.clip(height - row * 8, 0, 8))] for height in heights)
        console.print(Text(f"{label:>{axis}} ▏").append(bars, "blue"), soft_wrap=True)
    mean = f"mean {float(total.mean()):.0f}, min {int(total.min())}, max {int(total.max())}"
    note = f"; one column is the largest of {per_column} CTAs" if per_column > 1 else ""
    console.print(f"[dim]{mean}{note}[/dim]")
