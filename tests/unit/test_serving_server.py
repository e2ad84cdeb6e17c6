# SPDX-License-Identifier: Apache-2.0
"""A server process is started, asked and stopped, whatever the environment says of proxies."""

from __future__ import annotations

import sys
from pathlib import Path

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
    settings = {"environment": env.child_environment(), "log": tmp_path / "log", "start_timeout": 300}
    with Server("server", [sys.executable, "-c", PROGRAM], "m", **settings) as server:
        assert server.metric("requests") == 7
    assert server.stop() != 0
