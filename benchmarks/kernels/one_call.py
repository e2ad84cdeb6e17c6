# SPDX-License-Identifier: Apache-2.0
"""Runs one layer of a row of `bench kernels --device cuda` three times, for a profiler.

    python benchmarks/kernels/one_call.py ROW [VARIANT]

VARIANT: a shipped variant of attention. Rows are those of the tables "targets" and "variants".
"""

from __future__ import annotations

import sys

import torch

from fi_backend.benchmarks.cuda import cases
from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.cuda.tables import row_named
from fi_backend.benchmarks.cuda.ways import variant_arguments

if __name__ == "__main__":
    row = row_named(sys.argv[1])
    problem = cases.make_problem(row, layers=2, device=torch.device("cuda", torch.cuda.current_device()))
    variant = sys.argv[2] if len(sys.argv) > 2 else ""
    run = prepare_ours(problem, variant, variant_arguments(variant, problem) if variant else None).run
    for call in range(3):
        run(call % 2)
    torch.cuda.synchronize()
