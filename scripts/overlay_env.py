# SPDX-License-Identifier: Apache-2.0
"""Virtual environments over another one: they see its packages and may have other versions of some."""

from __future__ import annotations

import subprocess
import sysconfig
import venv
from pathlib import Path


def make(folder: Path) -> Path:
    """Return the interpreter of an environment in `folder` that sees the packages of the running one.

    What is installed into it comes first. It is made anew where there is none; pip is that of the base.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=False)
    # addsitedir, not a bare path: editable installs are .pth files themselves.
    base = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    (packages(python) / "base.pth").write_text(base)
    return python


def packages(python: Path) -> Path:
    """Return the folder into which packages are installed for an interpreter."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())
