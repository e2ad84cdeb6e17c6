# SPDX-License-Identifier: Apache-2.0
"""What shared prefixes may take of a plan, and which specs share at all."""

from __future__ import annotations

from dataclasses import dataclass

from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Capacity for shared prefixes; what exceeds it is read by each request, and nothing fails.

    max_nodes: prefix nodes of one step that are read once for all their members. max_levels: such nodes above
    one request. max_tokens: query tokens of one step that are members of a node. Scratch memory grows by
    ``(max_levels + 1) * max_tokens`` rows of every head. Raises TypeError or ValueError naming the field.
    """

    max_nodes: int
    max_levels: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name in ("max_nodes", "max_levels", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int; got {value!r} of type {type(value).__name__}.")
            if not 1 <= value < 2**31:
                raise ValueError(f"{name}: expected 1 .. 2**31 - 1; got {value}.")

    @classmethod
    def for_limits(cls, max_requests: int, max_tokens: int) -> SharingLimits:
        """The default for steps of so many requests and query tokens: three levels, all requests decoding."""
        return cls(
            max_nodes=max(1, max_requests // 2),
            max_levels=3,
            max_tokens=min(max_requests, max_tokens),
        )


def flat_reason(spec: AttentionSpec, variant: AttentionVariant | None = None) -> str | None:
    """Why batches of `spec` with `variant` are planned flat whatever their requests share, or None.

    The states of a prefix are computed for rows of many requests at once, so that nothing in them may depend
    on a row's position or request, nor on which requests there are.
    """
    if spec.window_left >= 0:
        return "window_left: which keys of a prefix are visible depends on the row"
    if spec.batch_invariant:
        return "batch_invariant: a row's bits would depend on the requests that share its prefix"
    if spec.custom_mask:
        return "custom_mask: which keys of a prefix are visible depends on the row"
    if spec.alibi:
        return "alibi: logits depend on the distance to the row"
    return None if variant is None else variant.flat_reason
