# SPDX-License-Identifier: Apache-2.0
"""Calls of native functions, whose advice is in torch's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_ADVICE = {
    "Convert it with .to().": "Convert it with its astype().",
    "Call .contiguous() on it.": "Copy it, such as with ascontiguousarray().",
    "Copy it with .contiguous()": "Copy it",
    "Move it with .to().": "Move it with its own library.",
    "Move it with .cuda().": "Move it with its own library.",
    "expected a contiguous tensor; call .contiguous() on it.": "expected a contiguous array. Copy it.",
    "expected a tensor": "expected an array",
}


@contextmanager
def advised() -> Iterator[None]:
    """Raise the errors of native checks with advice for users of other array libraries."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        for of_torch, of_others in _ADVICE.items():
            text = text.replace(of_torch, of_others)
        if text == str(error):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(text) from None
