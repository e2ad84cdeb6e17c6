# SPDX-License-Identifier: Apache-2.0
"""The prefix tree of `explain` as text: who shares what, which runs are read once, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.tree import Tree

from fi_backend.cli.explain_model import Explanation
from fi_backend.cli.explain_plot import counted
from fi_backend.cli.prefix_tree import PrefixRun, PrefixTree

_MAX_CHILDREN = 12


def print_tree(console: Console, explanation: Explanation) -> None:
    """Print the tree and the KV tokens and bytes that the flat and the composed plan read."""
    tree = explanation.tree
    if tree is None:
        console.print("[bold]Prefix tree[/bold]: needs page ids; give --block-table or a --step that has one")
        return
    total = int(explanation.step.kv_lens.sum())
    drawn = Tree(
        f"[bold]Prefix tree[/bold]: {tree.copies} of {total} KV tokens are shared copies "
        f"({tree.copies / max(total, 1):.0%}); ● read once, ○ read by those below"
    )
    _add_runs(drawn, tree)
    console.print(drawn)
    _print_reads(console, tree)


def _print_reads(console: Console, tree: PrefixTree) -> None:
    if tree.flat_reason is not None:
        console.print(f"nothing is read once: {tree.flat_reason}", soft_wrap=True)
    levels = sum(run.level is not None for run in tree.walk())
    saved = tree.flat_reads - tree.composed_reads
    console.print(
        f"read for each KV head: {tree.flat_reads} KV tokens flat, {tree.composed_reads} with "
        f"{counted(levels, 'level')} ({saved / max(tree.flat_reads, 1):.0%} less)\n"
        f"K and V of a layer, in bfloat16: {_size(tree.flat_reads * tree.token_bytes)} flat, "
        f"{_size(tree.composed_reads * tree.token_bytes)} with levels; "
        f"{_size(saved * tree.token_bytes)} saved",
        soft_wrap=True,
    )


def _add_runs(drawn: Tree, tree: PrefixTree) -> None:
    in_runs = {request for root in tree.roots for request in root.requests}
    outside = [request for request in range(len(tree.own)) if request not in in_runs]
    pending = [(drawn, tree.roots, outside)]
    while pending:
        branch, runs, ending = pending.pop()
        for run in runs[:_MAX_CHILDREN]:
            below = {request for child in run.children for request in child.requests}
            rest = [request for request in run.requests if request not in below]
            pending.append((branch.add(_run_text(run)), run.children, rest))
        if len(runs) > _MAX_CHILDREN:
            branch.add(f"[dim]… {len(runs) - _MAX_CHILDREN} more shared runs[/dim]")
        _add_own(branch, [(request, *tree.own[request]) for request in ending])


def _run_text(run: PrefixRun) -> str:
    text = f"{len(run.requests)} requests × {run.end - run.begin} tokens"
    who = f"[dim](requests {_ranges(run.requests)})[/dim]"
    if run.level is None:
        return f"○ {text} {who}"
    more = f", with {run.begin - run.level.begin} tokens before" if run.level.begin < run.begin else ""
    return f"● {text} {who} [bold]by {counted(run.level.tiles, 'tile')}{more}[/bold]"


def _add_own(branch: Tree, own: Sequence[tuple[int, int, int]]) -> None:
    """Whole computed pages of requests that end here, which they share with nobody."""
    lengths = [(request, end - begin) for request, begin, end in own if end > begin]
    if len(lengths) <= _MAX_CHILDREN:
        for request, length in lengths:
            branch.add(f"{length} tokens [dim](request {request})[/dim]")
    else:
        each = [length for _, length in lengths]
        branch.add(f"{len(each)} requests with {min(each)} to {max(each)} tokens of their own")


def _size(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


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
