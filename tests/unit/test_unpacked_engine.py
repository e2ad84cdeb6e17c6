# SPDX-License-Identifier: Apache-2.0
"""scripts/unpacked.sh: what a command finds, how it ends, and that nothing it started is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Says where it imports from, starts a process that would stay, and sleeps.
COMMAND = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.environ["PYTHONPATH"], child.pid, sep="\\n", flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""


def run(folder: Path, *command: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "PATH": f"{path}{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "unpacked.sh"), str(folder / "engine"), *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine").mkdir()
    return tmp_path


def is_gone(pid: int) -> bool:
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(("seconds", "limit", "status"), [("0.1", "60", 7), ("600", "1", 124)])
def test_nothing_is_left_behind(folder: Path, seconds: str, limit: str, status: int) -> None:
    result = run(folder, sys.executable, "-c", COMMAND, seconds, LIMIT=limit)
    assert result.returncode == status, result.stderr
    path, pid = result.stdout.splitlines()
    assert path.split(":")[0] == str(folder / "engine")
    assert str(ROOT) in path.split(":")
    assert is_gone(int(pid))


def test_a_gpu_whose_memory_is_held_is_refused(folder: Path) -> None:
    tools = folder / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\ncase $* in *memory*) echo 131803 ;; esac\n")
    (tools / "nvidia-smi").chmod(0o755)
    result = run(folder, sys.executable, "-c", "print('ran')", path=f"{tools}:")
    assert (result.returncode, result.stdout) == (3, "")
    assert "131803 MiB are held" in result.stderr


def test_the_folder_has_to_be_there(folder: Path) -> None:
    (folder / "engine").rmdir()
    result = run(folder, "true")
    assert result.returncode == 2
    assert "expected a folder" in result.stderr
