# SPDX-License-Identifier: Apache-2.0
"""What a record of a measurement says of where and how it was made."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fi_backend.benchmarks.record import gpu_driver, without_folders
from fi_backend.cli.serve_interrupt import Interrupted, interruptible


def run_main(main: Callable[[], None]) -> None:
    """Run a script that starts servers: a signal that ends it, as that of `timeout`, ends them with it."""
    try:
        with interruptible():
            main()
    except Interrupted as end:
        sys.exit(end.exit_code)


def circumstances(engine: str = "vllm") -> dict[str, Any]:
    """Return date, GPU, driver, versions and command line of this process.

    engine: the package that serves.
    """
    import torch

    served_by = importlib.import_module(engine)
    on_gpu = torch.cuda.is_available()
    command = " ".join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        **({"driver": gpu_driver()} if on_gpu else {}),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            engine: served_by.__version__,
        },
        "command": without_folders(command),
    }


class Record:
    """A record with a row for each way of serving; `path`: rewritten after each, None for no file."""

    def __init__(self, head: dict[str, Any], path: Path | None) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = {}
        self._whole = head | {"rows": self.rows}

    def keep(self, way: str, row: dict[str, Any]) -> None:
        """Add the row of a way, in place of what was kept of it before."""
        self.rows[way] = row
        if self._path:
            self._path.write_text(json.dumps(self._whole, indent=2) + "\n")
