#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Serves a known-answer model with real SGLang on the fi back end, on the CPU, and checks a completion
streamed over HTTP.

Exit status 0 only if the answer is right and the back end really computed it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import demo
from fi_backend import env
from fi_backend.benchmarks.models import copy_llama
from fi_backend.benchmarks.serving.known_answer import SGLANG_ARGUMENTS, SGLANG_CPU_VARIABLES
from fi_backend.benchmarks.serving.server import SglangServer

# Stand-ins for what SGLang imports and no index has for a CPU.
STUBS = Path(__file__).resolve().parents[1] / "tests" / "sglang_stubs"


def main() -> int:
    """Run the demo and return the exit status."""
    with tempfile.TemporaryDirectory(prefix="fi-demo-") as folder:
        root = Path(folder)
        model, stats_dir = root / "copy-llama", root / "stats"
        copy_llama.make(model)
        print(f"model: copy-llama, 2 layers, made in {model}", flush=True)
        path = os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])])
        server = SglangServer(
            model,
            ["--attention-backend", "fi", "--device", "cpu", *SGLANG_ARGUMENTS],
            environment=env.child_environment(
                **SGLANG_CPU_VARIABLES,
                HF_HUB_OFFLINE="1",
                PYTHONPATH=path,
                FI_BACKEND_STATS_DIR=str(stats_dir),
            ),
            log=root / "sglang.log",
            progress=demo.Progress("SGLang"),
        )
        return demo.ask(server, f"$ python {' '.join(server.command[1:])}", stats_dir, engine="SGLang")


if __name__ == "__main__":
    sys.exit(main())
