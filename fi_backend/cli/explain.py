# SPDX-License-Identifier: Apache-2.0
"""`fi-backend explain`: draw how a step is cut, shared and balanced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fi_backend.cli.shell import InputError, console, integers, user_input

if TYPE_CHECKING:
    from fi_backend.core.step import Step

_OPTIONS = {
    "kv_lens": "--kv-lens",
    "num_qo_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "page_size": "--page-size",
    "num_ctas": "--ctas",
    "window_left": "--window",
    "block_table": "--block-table",
}


def explain(
    kv_lens: Annotated[str, typer.Option(help="KV tokens of each request, for example 100,2000,31.")] = "",
    q_lens: Annotated[str, typer.Option(help="Query tokens of each request (default: 1 each).")] = "",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="KV heads.")] = 8,
    page_size: Annotated[int, typer.Option(help="KV tokens of a page.")] = 16,
    ctas: Annotated[
        int | None, typer.Option(help="CTAs to balance over (default: the saved step's, else 132).")
    ] = None,
    window: Annotated[int, typer.Option(help="Visible tokens to the left of a query; -1 is all.")] = -1,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Plan batch-invariantly.")
    ] = False,
    planned_queues: Annotated[
        bool, typer.Option("--planned-queues", help="Show the queues of Algorithm 1 instead of tickets.")
    ] = False,
    costs: Annotated[
        str,
        typer.Option(help="Cost model of the planner: cuda or cpu (default: the saved step's, else cuda)."),
    ] = "",
    block_table: Annotated[
        Path | None, typer.Option(help="JSON file: one list of page ids for each request.")
    ] = None,
    step: Annotated[Path | None, typer.Option(help="JSON file of a saved step, instead of lengths.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write: .svg, .png or .pdf (needs the extra plot).")
    ] = None,
    prefix: Annotated[
        bool,
        typer.Option("--prefix", help="Print only the prefix tree, which of it is read once, and savings."),
    ] = False,
    text: Annotated[bool, typer.Option("--text", help="Print as text (the default without --out).")] = False,
) -> None:
    """Draw how a step is cut into work items, which prefixes it shares, and how it loads the CTAs."""
    if costs not in ("", "cuda", "cpu"):
        raise InputError(f"--costs: expected cuda or cpu; got {costs!r}")
    if ctas is not None and ctas < 1:
        raise InputError(f"--ctas: expected >= 1; got {ctas}")
    # Imported here, so that --help and wrong arguments need no torch.
    with user_input(**_OPTIONS):
        if step is not None:
            described = _saved(step, bool(kv_lens or q_lens or block_table))
        else:
            described = _typed(
                kv_lens, q_lens, heads, kv_heads, page_size, window, batch_invariant, block_table
            )
        import torch

        from fi_backend.cli.explain_model import explain_step
        from fi_backend.core.planner import CostModel

        explanation = explain_step(
            described,
            num_ctas=ctas or described.num_ctas or 132,
            costs=CostModel.for_device(torch.device(costs or described.device or "cuda")),
            planned_queues=planned_queues,
        )
    if out is not None:
        from fi_backend.cli.explain_plot import save_picture

        with user_input():
            save_picture(explanation, out)
        console().print(f"wrote {out}", soft_wrap=True, markup=False)
    if prefix:
        from fi_backend.cli.explain_text import print_prefixes

        print_prefixes(console(), explanation)
    elif text or out is None:
        from fi_backend.cli.explain_text import print_explanation

        print_explanation(console(), explanation)


def _saved(path: Path, also_typed: bool) -> Step:
    from fi_backend.core.step import load_step

    if also_typed:
        raise InputError("--step: expected it alone; got --kv-lens, --q-lens or --block-table as well")
    return load_step(path)


def _typed(
    kv_text: str,
    q_text: str,
    heads: int,
    kv_heads: int,
    page_size: int,
    window: int,
    batch_invariant: bool,
    block_table: Path | None,
) -> Step:
    if not kv_text:
        raise InputError(
            "--kv-lens: expected the KV tokens of each request, for example 100,2000; got nothing"
        )
    kv_lens = integers("--kv-lens", kv_text, low=0)
    q_lens = integers("--q-lens", q_text, low=0) if q_text else [1] * len(kv_lens)
    if len(q_lens) != len(kv_lens):
        raise InputError(
            f"--q-lens: expected {len(kv_lens)} entries, as many as --kv-lens; got {len(q_lens)}"
        )
    import numpy as np

    from fi_backend.core.step import Step

    return Step(
        qo_indptr=np.cumsum([0, *q_lens]),
        kv_lens=np.asarray(kv_lens),
        page_size=page_size,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        window_left=window,
        batch_invariant=batch_invariant,
        block_table=_table(block_table) if block_table else None,
    )


def _table(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise InputError(
            f"--block-table: expected a JSON list of lists of page ids in {path}; got {error}"
        ) from error
