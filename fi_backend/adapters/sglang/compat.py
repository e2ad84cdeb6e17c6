# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on the version of SGLang: what the adapter relies on, and how it registers.

Checked against SGLang 0.5.17 and 0.5.23. Importing this module imports no part of SGLang.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

from fi_backend.adapters import contract

NAME: Final = "fi"

_BACKEND: Final = "sglang.srt.layers.attention.base_attn_backend"
_BATCH: Final = "sglang.srt.model_executor.forward_batch_info"
_DRAFTS: Final = "sglang.srt.speculative.draft_utils"
_CONTRACT: Final[contract.Contract] = (
    ("sglang.srt.server_args", "ATTENTION_BACKEND_CHOICES", ()),
    *(
        ("sglang.srt.server_args", f"add_{kind}attention_backend_choices", ())  # called by position
        for kind in ("", "deterministic_", "radix_supported_deterministic_")
    ),
    ("sglang.srt.layers.attention.attention_registry", "register_attention_backend", ("name",)),
    ("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS", ()),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register", ("target", "hook", "hook_type")),
    ("sglang.srt.plugins.hook_registry", "HookType.AFTER", ()),
    ("sglang.srt.plugins.hook_registry", "HookType.AROUND", ()),
    ("sglang.srt.distributed.parallel_state", "get_tensor_model_parallel_rank", ()),
    ("sglang.srt.utils.common", "support_triton", ("backend",)),
    ("sglang.srt.utils.common", "is_cpu", ()),
    *(
        (
            _BACKEND,
            f"AttentionBackend.{name}",
            ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        )
        for name in ("forward_extend", "forward_decode")
    ),
    (_BACKEND, "AttentionBackend.init_forward_metadata", ("self", "forward_batch")),
    (
        _BACKEND,
        "AttentionBackend.init_forward_metadata_out_graph",
        ("self", "forward_batch", "in_capture"),
    ),
    (_BACKEND, "AttentionBackend.init_forward_metadata_in_graph", ("self", "forward_batch")),
    (_BACKEND, "AttentionBackend.init_cuda_graph_state", ("self", "max_bs", "max_num_tokens")),
    (_BACKEND, "AttentionBackend.get_cuda_graph_seq_len_fill_value", ("self",)),
    (_BACKEND, "AttentionBackend.verify_mask", ()),
    (
        _BACKEND,
        "AttentionBackend.update_verify_buffers_to_fill_after_draft",
        ("self", "spec_info", "cuda_graph_bs"),
    ),
    ("sglang.srt.layers.attention.verify_mask", "VerifyMask", ("buffer", "mode", "max_bs")),
    ("sglang.srt.speculative.eagle_utils", "TreeMaskMode.QLEN_ONLY", ()),
    (_DRAFTS, "DraftBackendFactory._create_backend", ("self", "backend_name", "backend_map")),
    (_DRAFTS, "DraftBackendFactory._create_triton_decode_backend", ("self",)),
    (_DRAFTS, "DraftBackendFactory._create_triton_prefill_backend", ("self",)),
    (_BATCH, "build_inner_fb_view", ("forward_batch", "bs", "forward_mode")),
    (_BATCH, "ForwardBatch.init_new", ("batch", "model_runner")),
    (
        "sglang.srt.mem_cache.base_prefix_cache",
        "BasePrefixCache.resolve_node_handle",
        ("self", "node_handle"),
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
        _BATCH,
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
            "rids",
        ),
    ),
    *(
        (_BATCH, f"ForwardMode.{mode}", ())
        for mode in ("EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2")
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
    """Make fi a choice of --attention-backend and its variants, served by `FiAttnBackend`.

    Raises RuntimeError when another plug-in has taken the name.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registered = attention_registry.ATTENTION_BACKENDS.get(NAME)
    if registered is _create:
        return
    if registered is not None or NAME in server_args.ATTENTION_BACKEND_CHOICES:
        raise RuntimeError(f"attention back end {NAME} is already registered for {registered}")
    HookRegistry.register("sglang.srt.utils.common.support_triton", _no_triton_on_cpu, HookType.AFTER)
    HookRegistry.register(f"{_DRAFTS}.DraftBackendFactory._create_backend", _with_drafts, HookType.AROUND)
    HookRegistry.register(f"{_BATCH}.ForwardBatch.init_new", _tell_batch, HookType.AFTER)
    attention_registry.register_attention_backend(NAME)(_create)
    server_args.add_attention_backend_choices([NAME])
    # A row's bits depend on its request alone, also where a prefix comes from the radix cache.
    server_args.add_deterministic_attention_backend_choices([NAME])
    server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    if hasattr(server_args, "add_draft_attention_backend_choices"):  # 0.5.23
        server_args.add_draft_attention_backend_choices([NAME])


def plans_on_another_stream() -> bool:
    """Return whether SGLang prepares the steps of speculation on a stream beside that of the model."""
    settings = importlib.import_module("sglang.srt.environ").envs
    variable = getattr(settings, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", None)
    return variable is not None and bool(variable.get())


def tensor_parallel_rank() -> int:
    """Return which part of the heads this process has."""
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def reads_end_before_replay() -> Any:
    """Return 0.5.23's word for a graph that reads nothing which the scheduler may write."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.PRE_REPLAY


def _create(model_runner: Any) -> Any:
    from .backend import FiAttnBackend

    return FiAttnBackend(model_runner)


def _no_triton_on_cpu(result: bool, backend: str) -> bool:
    """Answer for SGLang, which takes a name that it does not know for one of a GPU.

    It would run its own index kernels in Triton then, on the CPU too.
    """
    from sglang.srt.utils.common import is_cpu

    return False if backend == NAME and is_cpu() else result


def _with_drafts(
    original: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *rest: Any, **more: Any
) -> Any:
    """Let a draft model run on fi: SGLang's table of its back ends is fixed."""
    from .draft import FiDraftBackend

    decodes = backend_map.get("triton") == factory._create_triton_decode_backend

    def create() -> Any:
        runner = factory.draft_model_runner
        made = FiDraftBackend(runner, factory) if decodes else _create(runner)
        return (NAME, made) if "stamps_children" in _parameters(original) else made  # 0.5.23: with its name

    return original(factory, backend_name, {**backend_map, NAME: create}, *rest, **more)


def _tell_batch(result: Any, _class: Any, batch: Any, model_runner: Any, *_: Any, **__: Any) -> None:
    """Hand the scheduler's batch, which knows the requests and their tree, to our back ends."""
    chosen: Any = getattr(model_runner, "attn_backend", None)
    parts = ("prefill_backend", "decode_backend")
    backends: list[Any] = [chosen, *(getattr(chosen, part, None) for part in parts)]
    for each in backends:
        if type(each).__name__ == "FiAttnBackend":
            each.expect(batch, result)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)
