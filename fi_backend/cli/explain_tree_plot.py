# SPDX-License-Identifier: Apache-2.0
"""The prefix tree as an icicle: depth in KV tokens to the right, one lane for each request."""

from __future__ import annotations

from typing import Any

import numpy as np

from fi_backend.cli.explain_model import Explanation
from fi_backend.cli.prefix_tree import PrefixTree

_OWN_COLOUR, _TAIL_COLOUR, _LEVEL_COLOUR = "#a6cfe8", "#e3e3e3", "#222222"
# Least shares of the panel's height and width that a label needs.
_LABEL_HEIGHT, _LABEL_WIDTH, _SHORT_LABEL_WIDTH = 0.045, 0.17, 0.11


def draw_tree(axis: Any, explanation: Explanation, tree: PrefixTree) -> None:
    """Draw the runs of shared pages, each as high as the number of requests that share it.

    Those that the composed plan reads once have a dark frame.
    """
    from matplotlib.patches import Patch

    step = explanation.step
    lane = {request: index for index, request in enumerate(explanation.order)}
    requests = len(lane)
    width = max(int(step.kv_lens.max(initial=0)), 1)
    # The whole length first: what no computed, full page covers stays visible behind them.
    order = np.asarray(explanation.order, np.int64)
    axis.barh(np.arange(requests), step.kv_lens[order], height=0.9, color=_TAIL_COLOUR, linewidth=0)
    own = np.asarray(tree.own, np.int64).reshape(-1, 2)[order]
    axis.barh(
        np.arange(requests),
        np.maximum(own[:, 1] - own[:, 0], 0),
        left=own[:, 0],
        height=0.9,
        color=_OWN_COLOUR,
        edgecolor="white",
        linewidth=0.8 if requests <= 64 else 0,
    )
    for run in tree.walk():
        # A run's requests are neighbours: the order follows the leaves.
        top = min(lane[request] for request in run.requests)
        count, length = len(run.requests), run.end - run.begin
        axis.barh(
            top + (count - 1) / 2,
            length,
            left=run.begin,
            height=count - 0.1,
            color=_colour(count, requests),
            edgecolor=_LEVEL_COLOUR if run.level else "white",
            linewidth=1.6 if run.level else 0.8,
        )
        if count / requests >= _LABEL_HEIGHT and length / width >= _SHORT_LABEL_WIDTH:
            axis.text(
                run.begin + length / 2,
                top + (count - 1) / 2,
                f"{count} × {length}" + (" tokens" if length / width >= _LABEL_WIDTH else ""),
                ha="center",
                va="center",
                fontsize=8,
                color="white",
                clip_on=True,
            )
    total = int(step.kv_lens.sum())
    axis.set_title(
        f"Prefix tree: {tree.copies} of {total} KV tokens are shared copies "
        f"({tree.copies / max(total, 1):.0%})"
    )
    axis.set_xlim(0, width)
    axis.set_ylim(max(requests, 1) - 0.5, -0.5)
    axis.set_xlabel("KV token")
    if requests <= 24:
        axis.set_yticks(range(requests), [str(request) for request in explanation.order])
        axis.set_ylabel("request")
    else:
        axis.set_yticks([])
        axis.set_ylabel(f"{requests} requests, in the tree's order")
    axis.tick_params(axis="y", length=0)
    axis.legend(
        handles=[
            Patch(
                facecolor=_colour(requests or 2, max(requests, 2)), label="shared (darker: by more requests)"
            ),
            Patch(facecolor="white", edgecolor=_LEVEL_COLOUR, linewidth=1.6, label="read once"),
            Patch(facecolor=_OWN_COLOUR, label="own full pages"),
            Patch(facecolor=_TAIL_COLOUR, label="this step's tokens"),
        ],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=4,
        frameon=False,
        handlelength=1.2,
    )
    for side in axis.spines.values():
        side.set_visible(False)


def _colour(count: int, requests: int) -> Any:
    """From orange to dark red-brown, by the logarithm of the sharers."""
    share = np.log2(count / 2) / max(np.log2(max(requests, 3) / 2), 1e-9)
    light, dark = np.array([0.87, 0.42, 0.05]), np.array([0.45, 0.16, 0.0])
    return tuple(light + (dark - light) * min(share, 1.0))
