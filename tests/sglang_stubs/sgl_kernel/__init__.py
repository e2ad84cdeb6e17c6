# SPDX-License-Identifier: Apache-2.0
"""Stands in for SGLang's kernels on a CPU: SGLang imports names from here that a plain model never calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "99.0.0"  # SGLang asks for a least version


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: not in the stand-in for machines without these kernels"
        )

    return missing
