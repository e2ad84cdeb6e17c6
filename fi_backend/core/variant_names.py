# SPDX-License-Identifier: Apache-2.0
"""Variants by name: those that plug-ins register, ours among them."""

from __future__ import annotations

from fi_backend.core.variant import AttentionVariant


def find_variant(variant: AttentionVariant | str | None) -> AttentionVariant | None:
    """Return a variant given as itself or by its registered name.

    Raises ValueError that lists the names for an unknown one, TypeError for anything else.
    """
    if variant is None or isinstance(variant, AttentionVariant):
        return variant
    if not isinstance(variant, str):
        raise TypeError(
            f"variant: expected an AttentionVariant or the name of one; got {type(variant).__name__}."
        )
    from fi_backend.hooks import plugins

    known = plugins().variants()
    if variant not in known:
        raise ValueError(f"variant: expected one of {', '.join(sorted(known))}; got {variant!r}.")
    return known[variant]
