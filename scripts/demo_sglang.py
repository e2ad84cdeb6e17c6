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
from models import copy_llama
from serving import SglangServer

# Stand-ins for what SGLang imports and no index has for a CPU.
STUBS = Path(__file__).resolve().parents[1] / "tests" / "sglang_stubs"
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRITON_INTERPRET": "1",  # its allocator of pages is a Triton kernel
    "OMP_NUM_THREADS": "1",
}
ENGINE_ARGUMENTS = (
    *("--device", "cpu", "--attention-backend", "fi", "--dtype", "bfloat16", "--page-size", "16"),
    *("--context-length", "4096", "--max-running-requests", "4", "--max-total-tokens", "16384"),
    *("--chunked-prefill-size", "1024", "--disable-cuda-graph", "--mem-fraction-static", "0.3"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-server-warmup"),
)


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
            ENGINE_ARGUMENTS,
            environment=env.child_environment(
                **SETTINGS, PYTHONPATH=path, FI_BACKEND_STATS_DIR=str(stats_dir)
            ),
            log=root / "sglang.log",
            progress=demo.Progress("SGLang"),
        )
        return demo.ask(server, f"$ python {' '.join(server.command[1:])}", stats_dir, engine="SGLang")


if __name__ == "__main__":
    sys.exit(main())
