# SPDX-License-Identifier: Apache-2.0
"""How the back end gets into vLLM, what it accepts, and what it refuses with which words."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from fi_backend.adapters.vllm import compat, plugin

SUPPORTED: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
}


@pytest.fixture(autouse=True)
def _registered() -> None:
    plugin.register()


@pytest.fixture
def select() -> Iterator[Any]:
    """Ask vLLM's platform for the back end of a configuration, as vLLM does."""

    def choose(name: str = "FI", **config: Any) -> str:
        selector = AttentionSelectorConfig(**{**SUPPORTED, **config})
        return current_platform.get_attn_backend_cls(AttentionBackendEnum[name], selector, num_heads=8)

    return choose


def test_registering_again_changes_nothing() -> None:
    before = current_platform.get_attn_backend_cls.__func__
    plugin.register()
    assert current_platform.get_attn_backend_cls.__func__ is before
    assert list(AttentionBackendEnum.__members__).count("FI") == 1
    assert AttentionBackendEnum["FI"].get_class().get_name() == "FI"


def test_entry_point_is_installed() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="vllm.general_plugins", name="fi_backend")
    assert entry.load() is plugin.register


@pytest.mark.parametrize("name", ["fi", "FI", "Fi"])
def test_any_case_on_the_command_line(name: str) -> None:
    from vllm.config.attention import AttentionConfig

    assert AttentionConfig(backend=name).backend is AttentionBackendEnum["FI"]


def test_a_pickled_choice_is_read_before_plugins_are_loaded() -> None:
    """Spawned engine processes unpickle their configuration first."""
    data = pickle.dumps([AttentionBackendEnum["FI"], AttentionBackendEnum.CPU_ATTN])
    code = f"import pickle; print([member.name for member in pickle.loads({data!r})])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "['FI', 'CPU_ATTN']"


def test_registering_initialises_no_accelerator() -> None:
    code = (
        "import torch, fi_backend.adapters.vllm.plugin as p; p.register(); "
        "import sys; print(torch.cuda.is_initialized(), 'fi_backend.core.attention' in sys.modules)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.splitlines()[-1] == "False False"


ACCEPTED: list[dict[str, Any]] = [
    *({"head_size": size} for size in (1, 7, 64, 80, 96, 192, 256, 512)),
    *({"dtype": dtype} for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *({"kv_cache_dtype": d} for d in (None, "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")),
    *({"block_size": size} for size in (None, 8, 16, 24, 128, 1024)),
    {"has_sink": True},
    {"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"},
    {"has_sliding_window": True},
    {"use_batch_invariant": True},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=str)
def test_accepted(select: Any, config: dict[str, Any]) -> None:
    assert select(**config) == compat.BACKEND_PATH


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"head_size": 513}, "head size 513 is outside 1..512"),
    ({"dtype": torch.float64}, "torch.float64 is none of"),
    ({"kv_cache_dtype": "nvfp4"}, "KV cache dtype nvfp4 is none of auto, float16"),
    ({"block_size": 12}, "block size 12 is not a multiple of 8"),
    ({"use_mla": True}, "MLA not supported"),
    ({"use_sparse": True}, "sparse not supported"),
    ({"use_mm_prefix": True}, "multimodal"),
    ({"use_non_causal": True}, "non-causal attention not supported"),
    ({"use_pcp": True}, "PCP not supported"),
    ({"use_dcp": True}, "DCP not supported"),
    ({"use_rswa": True}, "R-SWA not supported"),
    ({"use_kv_connector": True}, "KV connector not supported"),
    ({"use_adaptive_verification": True}, "query lens mismatch not supported"),
    *(
        ({"attn_type": kind}, f"attention type {kind} not supported")
        for kind in ("encoder", "encoder_only", "encoder_decoder")
    ),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_with_the_reason(select: Any, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match="attention back end FI cannot run") as caught:
        select(**config)
    assert reason in str(caught.value)


def _reasons_on_gpu(capability: tuple[int, int] = (9, 0), **config: Any) -> list[str]:
    """Ask as vLLM's CUDA platform does."""
    from vllm.platforms.interface import DeviceCapability

    selector = AttentionSelectorConfig(**{**SUPPORTED, **config})
    backend = AttentionBackendEnum["FI"].get_class()
    return backend.validate_configuration(
        device_capability=DeviceCapability(*capability), **selector._asdict()
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the core is asked about; it knows the kernels and here accepts everything but float32."""
    from fi_backend.adapters.vllm import backend

    questions = []

    def unsupported_reason(spec: Any, device: torch.device) -> str | None:
        questions.append((spec, device))
        return "dtype: no float32 here" if spec.dtype == "float32" else None

    monkeypatch.setattr(backend, "unsupported_reason", unsupported_reason)
    return questions


def test_a_gpu_runs_what_the_core_has_kernels_for(asked: list[Any]) -> None:
    assert _reasons_on_gpu(has_sink=True, kv_cache_dtype="fp8_e5m2", block_size=24, head_size=80) == []
    [(spec, device)] = asked
    assert (spec.head_dim, spec.dtype, spec.kv_dtype) == (80, "bfloat16", "float8_e5m2")
    assert (spec.page_size, spec.sinks, device) == (24, True, torch.device("cuda"))
    assert _reasons_on_gpu(dtype=torch.float32) == ["dtype: no float32 here"]


def test_an_unset_block_size_and_cache_dtype_leave_the_choice_to_vllm(asked: list[Any]) -> None:
    assert _reasons_on_gpu(kv_cache_dtype=None, block_size=None) == []
    assert asked[0][0].kv_dtype == "bfloat16"


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_old_gpus_are_refused(asked: list[Any], capability: tuple[int, int], fits: bool) -> None:
    reasons = _reasons_on_gpu(capability)
    assert reasons == ([] if fits else ["compute capability 7.5 is below 8.0"])


def test_other_back_ends_are_chosen_as_before(select: Any) -> None:
    assert select("CPU_ATTN").endswith("CPUAttentionBackend")


def test_a_vllm_with_another_api_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder

    def forward(self: Any, layer: Any, hidden_states: Any) -> None: ...

    monkeypatch.setattr(AttentionImpl, "forward", forward)
    monkeypatch.delattr(AttentionMetadataBuilder, "build")
    monkeypatch.setattr(compat, "install", lambda: pytest.fail("registered nevertheless"))
    problems = compat.mismatches()
    assert len(problems) == 2
    assert "AttentionImpl.forward: expected the parameters (self, layer, query" in problems[0]
    assert "AttentionMetadataBuilder.build: not found" in problems[1]
    logger = logging.getLogger("vllm.plugins.fi_backend")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    plugin.register()
    assert "AttentionImpl.forward" in caplog.text


def test_a_name_taken_by_another_plugin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "BACKEND_PATH", "other.Backend")
    with pytest.raises(RuntimeError, match=r"FI is already registered for fi_backend\."):
        compat.add_enum_member()


def test_vllms_cuda_platform_takes_fi() -> None:
    """vLLM's own selection on a GPU, with a made-up capability: its module imports without a driver."""
    code = """
import sys, types
import vllm
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
import torch
from fi_backend.adapters.vllm import plugin
from vllm.platforms.cuda import NonNvmlCudaPlatform as Platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
plugin.register()
Platform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
for dtype in (torch.bfloat16, torch.float32):
    config = AttentionSelectorConfig(head_size=128, dtype=dtype, kv_cache_dtype="auto", block_size=16)
    try:
        print(Platform.get_attn_backend_cls(AttentionBackendEnum["FI"], config, num_heads=8))
    except ValueError as error:
        print(error)
print(torch.cuda.is_initialized())
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    chosen, refused, touched = child.stdout.splitlines()[-3:]
    assert chosen == compat.BACKEND_PATH
    assert "float32" in refused
    assert touched == "False"
