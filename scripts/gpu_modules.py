# SPDX-License-Identifier: Apache-2.0
"""Compiles what GPU tests and benchmarks load, on a machine without a GPU, into a cache to take along.

    python scripts/gpu_modules.py build/gpu-cache --arch sm_90a
    FI_BACKEND_CACHE_DIR=build/gpu-cache scripts/gpu_tests.sh    # there

Otherwise they are compiled there, while the GPU waits. The cache serves the sources as they are now: a change
of a kernel's file, even of a comment, makes its modules anew.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fi_backend import AttentionSpec
from fi_backend.benchmarks.variant_oracles import ORACLES
from fi_backend.core import jit, kernels, planner
from fi_backend.core.ops_module import cuda_ops_module
from fi_backend.core.variant_names import find_variant

_TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
_TOGETHER = 6  # modules: an interrupted build keeps those before


def attention_modules(arch: str) -> Iterator[jit.ModuleSpec]:
    """Yield those that the tests of attention compile, among which are those of `bench kernels`."""
    sys.path.insert(0, str(_TESTS))
    for spec in importlib.import_module("gpu_specs").all_specs():
        yield kernels.cuda_attention_module(spec, arch)


def variant_modules(arch: str) -> Iterator[jit.ModuleSpec]:
    """Yield the shipped variants as `bench kernels --table variants` measures them."""
    spec = AttentionSpec(32, 8, 128, dtype="bfloat16", page_size=16)
    for variant in map(find_variant, ORACLES):
        yield kernels.with_variant(kernels.cuda_attention_module(spec, arch, variant), variant)


SETS: Mapping[str, Callable[[str], Iterator[jit.ModuleSpec]]] = {
    "planner": lambda arch: iter([planner.cuda_module(arch)]),
    "operators": lambda arch: iter([cuda_ops_module(arch)]),
    "attention": attention_modules,
    "variants": variant_modules,
}


def main() -> None:
    """Compile the chosen sets, a few modules at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="folder to fill")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--set", action="append", choices=SETS, help="default: all")
    chosen = parser.parse_args()
    modules = [module for name in chosen.set or SETS for module in SETS[name](chosen.arch)]
    modules = list(dict.fromkeys(modules))
    for first in range(0, len(modules), _TOGETHER):
        jit.build_all(modules[first : first + _TOGETHER], cache_dir=chosen.cache)
        print(f"{min(first + _TOGETHER, len(modules))} of {len(modules)} modules", flush=True)


if __name__ == "__main__":
    main()
