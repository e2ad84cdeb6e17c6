# SPDX-License-Identifier: Apache-2.0
"""A server process is started, asked and stopped, whatever the environment says of proxies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fi_backend import env
from fi_backend.benchmarks.serving.server import Server

PROGRAM = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = b'requests{model="a"} 3\\nrequests{model="b"} 4\\n' if self.path == "/metrics" else b""
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def test_a_proxy_is_not_asked_for_a_server_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    log = tmp_path / "logs" / "today" / "log"  # folders that nobody has made
    settings = {"environment": env.child_environment(), "log": log, "start_timeout": 300}
    with Server("server", [sys.executable, "-c", PROGRAM], "m", **settings) as server:
        assert server.metric("requests") == 7
    assert server.stop() != 0
    assert log.is_file()


STUBBORN = PROGRAM.replace(
    "http.server.HTTPServer",
    """import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("group", os.getpid(), flush=True)
if os.fork() == 0:
    while True: time.sleep(1)
http.server.HTTPServer""",
)


def test_an_interruption_while_it_is_stopped_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once more, while the engine takes its time to end."""
    log = tmp_path / "log"
    settings: dict[str, Any] = {"environment": env.child_environment(), "log": log, "start_timeout": 300}
    waits = []

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout)
        raise KeyboardInterrupt

    server = Server("server", [sys.executable, "-c", STUBBORN], "m", **settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), server:
        patch.setattr(subprocess.Popen, "wait", interrupted)
    assert waits == [30]
    [group] = [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("group")]
    assert server._process.wait(120) == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while _alive(group):
        assert time.monotonic() < deadline, "the engine's processes run on"
        time.sleep(0.05)


def _alive(group: int) -> bool:
    """Whether a process of the group runs; one that ended and that nobody has asked for does not."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False
