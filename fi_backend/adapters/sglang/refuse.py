# SPDX-License-Identifier: Apache-2.0
"""What fi does not run under SGLang, found before the first request.

Attributes are read by name, so that this module imports no part of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fi_backend.core.spec import FLOAT_DTYPES, FP8_DTYPES
from fi_backend.errors import UnsupportedError

from . import NAME

ADVICE: Final = "Choose another --attention-backend."
DEVICES: Final = ("cpu", "cuda")
# Those whose verification is causal or has a tree mask that fi reads.
SPECULATION: Final = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")

# (argument of the server, its value when it is off, what to say)
_REFUSED_ARGUMENTS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("dllm_algorithm", None, "diffusion language models"),
    ("enable_torch_compile", False, "torch.compile of the model"),
    ("enable_two_batch_overlap", False, "two-batch overlap: its halves would share one plan"),
    ("enable_pdmux", False, "prefill and decode multiplexing: steps would share one plan"),
    ("enable_dp_attention", False, "data-parallel attention"),
    ("dcp_size", 1, "decode context parallelism"),
    ("attn_cp_size", 1, "context parallelism"),
    ("disaggregation_mode", "null", "disaggregated prefill"),
    ("enable_hierarchical_cache", False, "the hierarchical KV cache"),
    ("enable_lmcache", False, "LMCache"),
    ("enable_unified_memory", False, "the unified memory pool"),
    ("enable_multi_layer_eagle", False, "drafts by several layers: never tried"),
)
# The contract demands them: one that SGLang has renamed would be refused no longer.
REFUSED_ARGUMENTS: Final = tuple(name for name, _, _ in _REFUSED_ARGUMENTS)
# Of some versions alone; 0.5.23 turns enable_dp_attention into this one.
_REFUSED_WHERE_KNOWN: Final = (("attn_dp_size", 1, "data-parallel attention"),)


def refuse_engine(model_runner: Any) -> None:
    """Raise UnsupportedError that names all that is switched on and that fi does not run."""
    arguments = model_runner.server_args
    reasons = [
        f"{name}={getattr(arguments, name)!r} ({meaning})"
        for name, off, meaning in (
            *_REFUSED_ARGUMENTS,
            *(each for each in _REFUSED_WHERE_KNOWN if hasattr(arguments, each[0])),
        )
        if (getattr(arguments, name) or off) != off
    ]
    algorithm = arguments.speculative_algorithm
    if algorithm is not None and str(algorithm).upper() not in SPECULATION:
        reasons.append(f"speculative_algorithm={algorithm!r} (fi verifies {', '.join(SPECULATION)})")
    if model_runner.device not in DEVICES:
        reasons.append(f"device={model_runner.device!r} (fi runs on {' and '.join(DEVICES)})")
    if model_runner.use_mla_backend:
        reasons.append("an MLA model")
    if model_runner.model_config.is_encoder_decoder:
        reasons.append("an encoder-decoder model")
    if reasons:
        raise UnsupportedError(f"not supported by fi under SGLang: {'; '.join(reasons)}. {ADVICE}")


def refuse_layer(layer: Any) -> None:
    """Raise UnsupportedError for a RadixAttention that is not causal decoder attention as fi knows it."""
    kind = getattr(layer.attn_type, "value", layer.attn_type)
    reasons = []
    if kind != "decoder":
        reasons.append(f"attn_type={kind}")
    if layer.is_cross_attention:
        reasons.append("cross attention")
    if layer.use_irope:
        reasons.append("use_irope (chunked local attention)")
    if layer.xai_temperature_len > 0:
        reasons.append(f"xai_temperature_len={layer.xai_temperature_len}")
    if layer.pos_encoding_mode != "NONE":
        reasons.append(f"pos_encoding_mode={layer.pos_encoding_mode}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        reasons.append(f"logit_capping_method={layer.logit_capping_method}")
    if layer.tp_k_head_num != layer.tp_v_head_num:
        reasons.append(f"{layer.tp_k_head_num} heads of K and {layer.tp_v_head_num} of V")
    if reasons:
        raise UnsupportedError(
            f"attention layer {layer.layer_id}: not supported by fi: {'; '.join(reasons)}. {ADVICE}"
        )


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for options that a model hands to a layer and that fi knows nothing of.

    Running without them would give wrong text.
    """
    active = sorted(name for name, value in options.items() if value is not None and value is not False)
    if active:
        raise UnsupportedError(f"options of the model not supported by fi: {', '.join(active)}. {ADVICE}")


def refuse_cache(pool: Any, plain: Any, hybrid: Any) -> None:
    """Raise UnsupportedError unless the KV cache is token-major and unpacked.

    plain, hybrid: SGLang's MHATokenToKVPool and SWAKVPool. Subclasses lay their memory out differently.
    """
    parts: tuple[Any, ...] = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is hybrid else (pool,)
    for part in parts:
        if type(part) is not plain:
            raise UnsupportedError(
                f"KV cache of the kind {type(part).__name__}: not supported by fi. {ADVICE}"
            )
        if (layout := part.kv_cache_layout) != "nhd":
            raise UnsupportedError(f"KV cache layout {layout}: fi under SGLang reads nhd. {ADVICE}")
        name = str(part.dtype).removeprefix("torch.")
        if name not in FLOAT_DTYPES + FP8_DTYPES or part.is_quantized_kv_cache:
            raise UnsupportedError(f"kv_cache_dtype {name}: not supported by fi. {ADVICE}")


def refuse_other_backends(model_runner: Any, layer: str) -> None:
    """Raise UnsupportedError where a layer with a variant would run without it in some of its steps."""
    arguments = model_runner.server_args
    for kind in ("prefill", "decode"):
        name = f"{kind}_attention_backend"
        chosen = getattr(arguments, name) or arguments.attention_backend
        if chosen != NAME:
            raise UnsupportedError(
                f"{name}={chosen}: attention layer {layer} runs a variant, which only {NAME} knows. "
                f"Give --attention-backend {NAME} alone."
            )


def refuse_draft(topk: int) -> None:
    """Raise UnsupportedError for drafts that branch: their steps do not lie in rows of the token table."""
    if topk > 1:
        raise UnsupportedError(
            f"speculative_eagle_topk={topk}: fi drafts chains (1) and verifies trees. "
            "Add --speculative-draft-attention-backend triton."
        )
