# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the package; each is also the built-in kind that a caller would expect."""

from __future__ import annotations


class UnsupportedError(NotImplementedError):
    """A combination of options that exists but is not implemented here; the text lists what is."""


class BuildError(RuntimeError):
    """A native module could not be built or found; the text holds the command and the path of the log."""


class PlanError(ValueError):
    """A batch does not fit the limits given at construction; the text holds the limit and the value."""
