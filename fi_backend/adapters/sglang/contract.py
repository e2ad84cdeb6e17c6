# SPDX-License-Identifier: Apache-2.0
"""What the adapter relies on in SGLang, of which importing this module imports no part.

Checked, when the adapter registers, against the SGLang that is installed; so far 0.5.17 and 0.5.23.
"""

from __future__ import annotations

from typing import Final

from fi_backend.adapters.contract import Contract

from .refuse import REFUSED_ARGUMENTS

_BACKEND: Final = "sglang.srt.layers.attention.base_attn_backend"
_BATCH: Final = "sglang.srt.model_executor.forward_batch_info"
_DRAFTS: Final = "sglang.srt.speculative.draft_utils"
_POOLS: Final = "sglang.srt.mem_cache"
_SERVER: Final = "sglang.srt.server_args"
# Read beside those that refuse.py names; a default in their place would plan for another engine.
_ARGUMENTS: Final = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "tp_size",
    "pp_size",
    "max_prefill_tokens",
    "chunked_prefill_size",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_eagle_topk",
)
CONTRACT: Final[Contract] = (
    (_SERVER, "ServerArgs", (*REFUSED_ARGUMENTS, *_ARGUMENTS)),
    (_SERVER, "ATTENTION_BACKEND_CHOICES", ()),
    *(
        (_SERVER, f"add_{kind}attention_backend_choices", ())  # called by position
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
        f"{_POOLS}.base_prefix_cache",
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
    (
        "sglang.srt.layers.radix_attention",
        "RadixAttention",
        frozenset(
            {
                "tp_q_head_num",
                "tp_k_head_num",
                "tp_v_head_num",
                "qk_head_dim",
                "v_head_dim",
                "scaling",
                "layer_id",
                "logit_cap",
                "logit_capping_method",
                "sliding_window_size",
                "is_cross_attention",
                "use_irope",
                "attn_type",
                "xai_temperature_len",
                "pos_encoding_mode",
                "k_scale_float",
                "v_scale_float",
            }
        ),
    ),
    ("sglang.srt.layers.radix_attention", "AttentionType.DECODER", ()),
    ("sglang.srt.configs.model_config", "ModelConfig", frozenset({"is_encoder_decoder", "hf_config"})),
    *(
        (f"sglang.srt.speculative.{module}", name, frozenset({"custom_mask", "draft_token_num", *more}))
        for module, name, more in (
            ("eagle_info", "EagleVerifyInput", ("topk",)),
            ("ngram_info", "NgramVerifyInput", ()),
        )
    ),
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
    (f"{_POOLS}.memory_pool", "ReqToTokenPool", frozenset({"req_to_token"})),
    (f"{_POOLS}.memory_pool", "MHATokenToKVPool.get_kv_buffer", ("self", "layer_id")),
    (
        f"{_POOLS}.memory_pool",
        "MHATokenToKVPool",
        frozenset({"dtype", "kv_cache_layout", "is_quantized_kv_cache"}),
    ),
    (f"{_POOLS}.swa_memory_pool", "SWAKVPool.get_kv_buffer", ("self", "layer_id")),
    (
        f"{_POOLS}.swa_memory_pool",
        "SWAKVPool",
        frozenset({"dtype", "full_kv_pool", "swa_kv_pool", "layers_mapping"}),
    ),
    (
        f"{_POOLS}.swa_memory_pool",
        "SWAKVPool.translate_loc_from_full_to_swa",
        ("self", "kv_indices"),
    ),
)
