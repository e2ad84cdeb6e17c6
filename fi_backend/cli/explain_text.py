# SPDX-License-Identifier: Apache-2.0
"""`explain` as text: block characters for the matrix and the loads, a tree for the prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from fi_backend.cli.explain_model import EMPTY, FULL, PARTIAL, SHARED, Explanation
from fi_backend.cli.explain_plot import counted, headline
from fi_backend.cli.prefix_tree import PrefixNode, tokens_saved

# Shape tells the kinds apart; colour only repeats it.
_KINDS = {EMPTY: ("·", "dim"), PARTIAL: ("░", "cyan"), FULL: ("█", "blue"), SHARED: ("▓", "dark_orange3")}
_LABEL_WIDTH = 26
_MAX_ROWS = 40
_BAR_ROWS = 8
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MAX_CHILDREN = 12


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
    _print_tree(console, explanation)
    console.print()
    _print_loads(console, explanation)


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


def _print_tree(console: Console, explanation: Explanation) -> None:
    if explanation.roots is None:
        console.print("[bold]Prefix tree[/bold]: needs page ids; give --block-table or a --step that has one")
        return
    step = explanation.step
    total = int(step.kv_lens.sum())
    saved = tokens_saved(explanation.roots, step.page_size)
    tree = Tree(
        f"[bold]Prefix tree[/bold]: {saved} of {total} KV tokens are shared copies "
        f"({saved / max(total, 1):.0%})"
    )
    _add_nodes(tree, explanation.roots, step.page_size)
    console.print(tree)


def _add_nodes(tree: Tree, nodes: Sequence[PrefixNode], page_size: int) -> None:
    pending = [(tree, nodes)]
    while pending:
        branch, children = pending.pop()
        shared = [node for node in children if len(node.requests) > 1]
        own = [node for node in children if len(node.requests) == 1]
        for node in shared[:_MAX_CHILDREN]:
            tokens = len(node.pages) * page_size
            who = f"[dim](requests {_ranges(node.requests)})[/dim]"
            pending.append(
                (branch.add(f"{len(node.requests)} requests × {tokens} tokens {who}"), node.children)
            )
        if len(shared) > _MAX_CHILDREN:
            branch.add(f"[dim]… {len(shared) - _MAX_CHILDREN} more shared runs[/dim]")
        if len(own) <= _MAX_CHILDREN:
            for node in own:
                branch.add(f"{len(node.pages) * page_size} tokens [dim](request {node.requests[0]})[/dim]")
        else:
            tokens_each = [len(node.pages) * page_size for node in own]
            branch.add(
                f"{len(own)} requests with {min(tokens_each)} to {max(tokens_each)} tokens of their own"
            )


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7", cut after six ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:6]]
    return ", ".join(texts) + (", …" if len(ranges) > 6 else "")


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
