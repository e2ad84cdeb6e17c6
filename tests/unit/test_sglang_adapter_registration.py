# SPDX-License-Identifier: Apache-2.0
"""The entry point under SGLang: what it registers, and that SGLang is left alone where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("sglang", reason="test_sglang_environment.py runs this where SGLang is installed")

# One process for all failures: none may leave behind what the next, or the success, meets.
PROGRAM = """
import argparse, importlib, json, logging, sys
sys.path[:0] = sys.argv[1:]
from sglang_cpu import server_arguments
from unittest.mock import patch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt import server_args
from sglang.srt.mem_cache import memory_pool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs
from sglang.srt.speculative import draft_utils
from sglang.srt.utils import common
try:
    from sglang.srt.arg_groups import choices
except ImportError:  # 0.5.17
    from sglang.srt import server_args as choices
from fi_backend.adapters.sglang import plugin

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append((record.levelname, record.getMessage()))
logging.getLogger("sglang.srt.plugins.fi_backend").addHandler(handler)
real_import = importlib.import_module

def broken_import(error):
    def load(name, *rest):
        if name == "sglang.srt.layers.radix_attention":
            raise error
        return real_import(name, *rest)
    return patch.object(importlib, "import_module", load)

def renamed(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
    pass

class WithoutLmcache:
    __struct_fields__ = [name for name in server_arguments().__dict__ if name != "enable_lmcache"]

class RowsOfTokens:
    def __init__(self):
        self.rows = None

def refusing(target, hook, hook_type=None):
    raise TypeError("no hooks today")

FAILURES = {
    "missing": lambda: broken_import(ModuleNotFoundError("no such module")),
    "library": lambda: broken_import(OSError("libcuda.so.1: cannot open")),
    "signature": lambda: patch.object(AttentionBackend, "forward_extend", renamed),
    "argument": lambda: patch.object(server_args, "ServerArgs", WithoutLmcache),
    "attribute": lambda: patch.object(memory_pool, "ReqToTokenPool", RowsOfTokens),
    "hook": lambda: patch.object(HookRegistry, "register", refusing),
    "taken": lambda: patch.dict(ATTENTION_BACKENDS, fi=print),
}

OPTIONS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

def accepted():
    arguments = ["--model-path", "x"]
    for name in OPTIONS:
        arguments += ["--" + name.replace("_", "-"), "fi"]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit:
        return None
    return [getattr(parsed, name) for name in OPTIONS]

results = {"refused": accepted()}
def attempt(name):
    messages.clear()
    plugin.register()
    plugin.register()
    results[name] = {
        "choices": ATTENTION_BACKEND_CHOICES.count("fi"),
        "registered": ATTENTION_BACKENDS.get("fi") not in (None, print),
        "messages": list(messages),
    }

for name, failure in FAILURES.items():
    with failure():
        attempt(name)
is_cpu = common.is_cpu
del common.is_cpu
attempt("removed")
common.is_cpu = is_cpu
attempt("success")
results["accepted"] = accepted()
results["deterministic"] = [
    name in getattr(choices, kind)
    for name in ("fi", "torch_native")
    for kind in ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND")
]
original = [draft_utils.DraftBackendFactory._create_backend]  # in a list, where hooks replace no name of it
HookRegistry.apply_hooks()
results["drafts"] = draft_utils.DraftBackendFactory._create_backend is not original[0]
from sglang.srt.utils.common import support_triton
results["triton"] = {name: support_triton(name) for name in ("fi", "torch_native")}
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    child = subprocess.run([sys.executable, "-c", PROGRAM, *sys.path], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("missing", "sglang.srt.layers.radix_attention.RadixAttention.__init__: not found (no such module)"),
        ("library", "OSError: libcuda.so.1: cannot open"),
        (
            "signature",
            "AttentionBackend.forward_extend: expected the parameters (self, q, k, v, layer, forward_",
        ),
        ("argument", "sglang.srt.server_args.ServerArgs: expected the fields enable_lmcache, got "),
        ("attribute", "ReqToTokenPool: expected the attributes req_to_token of its instances"),
        ("removed", "sglang.srt.utils.common.is_cpu: not found"),
        ("hook", "TypeError: no hooks today"),
        ("taken", "RuntimeError: attention back end fi is already registered for"),
    ],
)
def test_sglang_is_left_alone_and_the_reason_is_logged(
    results: dict[str, Any], failure: str, reason: str
) -> None:
    result = results[failure]
    level, message = result["messages"][0]
    assert level == "ERROR"
    assert message.startswith("fi_backend is not registered, --attention-backend fi will be unknown: ")
    assert reason in message
    assert (result["choices"], result["registered"]) == (0, False)


def test_registering_succeeds_after_the_failures_and_once(results: dict[str, Any]) -> None:
    assert results["success"] == {"choices": 1, "registered": True, "messages": []}


def test_the_command_line_takes_the_name(results: dict[str, Any]) -> None:
    assert results["refused"] is None
    assert results["accepted"] == ["fi", "fi", "fi"]


def test_sglang_runs_no_triton_for_fi_on_the_cpu(results: dict[str, Any]) -> None:
    assert results["triton"] == {"fi": False, "torch_native": False}


def test_deterministic_inference_takes_the_name(results: dict[str, Any]) -> None:
    assert results["deterministic"] == [True, True, False, False]


def test_draft_models_are_hooked(results: dict[str, Any]) -> None:
    assert results["drafts"] is True
