# SPDX-License-Identifier: Apache-2.0
"""Everything a spec runs, compiled before the first request could wait for it."""

from __future__ import annotations

from fi_backend.core import jit, kernels, planner
from fi_backend.core.spec import AttentionSpec


def prepare(*specs: AttentionSpec) -> None:
    """Build, in one parallel run, the modules that attention and cache appends of `specs` need.

    Returns at once when they are in the cache. Raises BuildError.
    """
    attention = {kernels.attention_module(spec): None for spec in specs}
    jit.build_all([*attention, kernels.OPS_MODULE, planner.MODULE])
