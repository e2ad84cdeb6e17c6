# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of SGLang: what the adapter relies on, and how it registers.

Checked against SGLang 0.5.17 and 0.5.23. Importing this module imports no part of SGLang.
"""

from __future__ import annotations

from typing import Any, Final

from fi_backend.adapters import contract

NAME: Final = "fi"

_CONTRACT: Final[contract.Contract] = (
    ("sglang.srt.server_args", "add_attention_backend_choices", ()),  # called by position
    ("sglang.srt.server_args", "ATTENTION_BACKEND_CHOICES", ()),
    ("sglang.srt.layers.attention.attention_registry", "register_attention_backend", ("name",)),
    ("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS", ()),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    ("sglang.srt.plugins.hook_registry", "HookType.AFTER", ()),
    ("sglang.srt.utils.common", "support_triton", ("backend",)),
    ("sglang.srt.utils.common", "is_cpu", ()),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata",
        ("self", "forward_batch"),
    ),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward_decode",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    (
        "sglang.srt.layers.radix_attention",
        "RadixAttention.__init__",
        (
            "self",
            "num_heads",
            "head_dim",
            "scaling",
            "num_kv_heads",
            "layer_id",
            "logit_cap",
            "v_head_dim",
            "sliding_window_size",
            "is_cross_attention",
            "pos_encoding_mode",
            "logit_capping_method",
        ),
    ),
    ("sglang.srt.layers.radix_attention", "AttentionType.DECODER", ()),
    (
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "req_pool_indices",
            "seq_lens",
            "seq_lens_cpu",
            "out_cache_loc",
            "extend_seq_lens",
            "extend_seq_lens_cpu",
            "spec_info",
        ),
    ),
    *(
        ("sglang.srt.model_executor.forward_batch_info", f"ForwardMode.{mode}", ())
        for mode in ("EXTEND", "DECODE", "MIXED", "IDLE")
    ),
    ("sglang.srt.mem_cache.memory_pool", "ReqToTokenPool", ()),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_kv_buffer", ("self", "layer_id")),
    ("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool.get_kv_buffer", ("self", "layer_id")),
    (
        "sglang.srt.mem_cache.swa_memory_pool",
        "SWAKVPool.translate_loc_from_full_to_swa",
        ("self", "kv_indices"),
    ),
)


def mismatches() -> list[str]:
    """Return what the installed SGLang lacks of the API that the adapter relies on, one line each."""
    return contract.mismatches(_CONTRACT)


def engine() -> str:
    """Return "sglang <version>"."""
    import sglang

    return f"sglang {sglang.__version__}"


def install() -> None:
    """Make fi a choice of --attention-backend and its two variants, served by `FiAttnBackend`.

    Raises RuntimeError when another plug-in has taken the name.
    """
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    registered = attention_registry.ATTENTION_BACKENDS.get(NAME)
    if registered is _create:
        return
    if registered is not None or NAME in ATTENTION_BACKEND_CHOICES:
        raise RuntimeError(f"attention back end {NAME} is already registered for {registered}")
    HookRegistry.register("sglang.srt.utils.common.support_triton", _no_triton_on_cpu, HookType.AFTER)
    attention_registry.register_attention_backend(NAME)(_create)
    add_attention_backend_choices([NAME])


def _create(model_runner: Any) -> Any:
    from .backend import FiAttnBackend

    return FiAttnBackend(model_runner)


def _no_triton_on_cpu(result: bool, backend: str) -> bool:
    """Answer for SGLang, which takes a name that it does not know for one of a GPU.

    It would run its own index kernels in Triton then, on the CPU too.
    """
    from sglang.srt.utils.common import is_cpu

    return False if backend == NAME and is_cpu() else result
