# SPDX-License-Identifier: Apache-2.0
"""Whether a step is planned with the prefixes that its requests share, and which these are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fi_backend.core.prefix_forest import PrefixForest
from fi_backend.core.sharing import SharingLimits, flat_reason
from fi_backend.core.spec import AttentionSpec
from fi_backend.core.variant import AttentionVariant
from fi_backend.errors import PlanError

if TYPE_CHECKING:
    from fi_backend.core.page_table import PageTable


def shares(
    spec: AttentionSpec, variant: AttentionVariant | None, room: SharingLimits | None, name: str
) -> bool:
    """Return whether the layer shares at all; raises PlanError naming the argument where it has no room."""
    if flat_reason(spec, variant):
        return False
    if room is None:
        raise PlanError(
            f"{name}: expected a BatchAttention with sharing=SharingLimits(...); got one without, which "
            "has no room for prefix nodes."
        )
    return True


def expect_one_source(forest: object, detect_prefixes: bool, shareable: object) -> None:
    """Check that a forest is given or looked for, and limits only where it is looked for."""
    if forest is not None and not isinstance(forest, PrefixForest):
        raise TypeError(f"forest: expected a PrefixForest; got {type(forest).__name__}.")
    if detect_prefixes and forest is not None:
        raise PlanError("detect_prefixes: expected False with a forest; got both.")
    if shareable is not None and not detect_prefixes:
        raise PlanError("shareable: expected detect_prefixes=True with it; got False.")


def found(
    spec: AttentionSpec, max_tile: int, table: PageTable, lengths: tuple[Any, Any], limits: Any
) -> PrefixForest:
    """Return what the requests of a step share; lengths: qo_indptr and kv_lens. Raises PlanError.

    max_tile: the planner's greatest query tile.
    """
    try:
        return PrefixForest.of_step(table, *lengths, group=spec.group_size, max_tile=max_tile, limits=limits)
    except ValueError as error:
        raise PlanError(str(error)) from None
