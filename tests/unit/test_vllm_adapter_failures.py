# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong while FI is registered: vLLM goes on without it, and the log says why."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

# One process for all failures: none may leave behind what the next, or the success, meets.
PROGRAM = """
import importlib, inspect, json, logging
from unittest.mock import patch
from vllm.config.attention import AttentionConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum as Enum
from fi_backend.adapters.vllm import compat, plugin

platform = type(current_platform)
before = platform.__dict__.get("get_attn_backend_cls")
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
logging.getLogger("vllm.plugins.fi_backend").addHandler(handler)
real_import = importlib.import_module

def broken_import(error):
    def load(name, *rest):
        if name == "vllm.v1.attention.backend":
            raise error
        return real_import(name, *rest)
    return patch.object(importlib, "import_module", load)

def raising(error):
    def function(*_, **__):
        raise error
    return function

FAILURES = {
    "missing": lambda: broken_import(ModuleNotFoundError("no such module")),
    "library": lambda: broken_import(OSError("libcuda.so.1: cannot open")),
    "assertion": lambda: broken_import(AssertionError("unsupported platform")),
    "inspect": lambda: patch.object(inspect, "signature", raising(ValueError("no signature found"))),
    "platform": lambda: patch.object(platform, "is_cpu", raising(RuntimeError("no platform"))),
    "enum": lambda: patch.object(Enum, "register", raising(TypeError("cannot extend"))),
}

def accepted():
    try:
        return AttentionConfig(backend="fi").backend.name
    except ValueError:
        return None

def state():
    return {
        "accepted": accepted(),
        "members": [name for name in Enum.__members__ if name == "FI"],
        "overrides": [str(member) for member in _ATTN_OVERRIDES],
        "platform as before": platform.__dict__.get("get_attn_backend_cls") is before,
    }

results = {}
def attempt(name):
    messages.clear()
    plugin.register()
    plugin.register()
    results[name] = {**state(), "messages": list(messages)}

for name, failure in FAILURES.items():
    with failure():
        attempt(name)
attempt("success")
with patch.object(compat, "BACKEND_PATH", "other.Backend"):
    platform.get_attn_backend_cls = before  # the plug-in that came first took the name; ours wrapped nothing
    attempt("taken")
print(json.dumps(results))
"""
UNTOUCHED = {"accepted": None, "members": [], "overrides": [], "platform as before": True}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("missing", "no such module"),
        ("library", "OSError: libcuda.so.1: cannot open"),
        ("assertion", "AssertionError: unsupported platform"),
        ("inspect", "ValueError: no signature found"),
        ("platform", "RuntimeError: no platform"),
        ("enum", "TypeError: cannot extend"),
    ],
)
def test_vllm_is_left_alone_and_the_reason_is_logged_once(
    results: dict[str, Any], failure: str, reason: str
) -> None:
    result = dict(results[failure])
    [(level, message)] = result.pop("messages")
    assert level == "ERROR"
    assert message.startswith("fi_backend is not registered, --attention-backend fi will be unknown: ")
    assert reason in message
    assert result == UNTOUCHED


def test_registering_succeeds_after_the_failures(results: dict[str, Any]) -> None:
    success = results["success"]
    assert (success["accepted"], success["members"], success["messages"]) == ("FI", ["FI"], [])
    assert not success["platform as before"]


def test_a_name_that_is_taken_stays_with_its_owner(results: dict[str, Any]) -> None:
    [(_, message)] = results["taken"]["messages"]
    assert "RuntimeError: attention back end FI is already registered for fi_backend." in message
    assert results["taken"]["platform as before"]
