# SPDX-License-Identifier: Apache-2.0
"""The peers that are shipped, imported when a benchmark asks: a variant's name costs no import of torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from fi_backend.hooks import hookimpl

if TYPE_CHECKING:
    from fi_backend.benchmarks.peers import Peer

_MODULES = {
    "cpu": ("fi_backend.benchmarks.vllm_cpu",),
    "cuda": (
        "fi_backend.benchmarks.cuda.fa3",
        "fi_backend.benchmarks.cuda.flashinfer_peers",
        "fi_backend.benchmarks.cuda.sglang_peers",
    ),
}


@hookimpl
def fi_backend_benchmark_peers(device: str) -> Sequence[Peer]:
    """Offer them in the order in which tables show them."""
    modules = map(importlib.import_module, _MODULES.get(device, ()))
    return list(chain.from_iterable(module.fi_backend_benchmark_peers(device) for module in modules))
