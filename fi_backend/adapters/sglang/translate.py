# SPDX-License-Identifier: Apache-2.0
"""SGLang's words for an engine, an attention layer and a step, in the words of the core; what is refused.

Attributes are read by name, so that this module imports no part of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fi_backend.core.planner import Limits
from fi_backend.core.spec import FLOAT_DTYPES, FP8_DTYPES, AttentionSpec, dtype_name
from fi_backend.errors import UnsupportedError

_ADVICE: Final = "Choose another --attention-backend."

# (argument of the server, its value when it is off, what to say)
_REFUSED_ARGUMENTS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("speculative_algorithm", None, "speculative decoding and its tree masks"),
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
)


def refuse_engine(model_runner: Any) -> None:
    """Raise UnsupportedError that names all that is switched on and that fi does not run."""
    arguments = model_runner.server_args
    reasons = [
        f"{name}={getattr(arguments, name)!r} ({meaning})"
        for name, off, meaning in _REFUSED_ARGUMENTS
        if (getattr(arguments, name, off) or off) != off
    ]
    if model_runner.device != "cpu":
        reasons.append(f"device={model_runner.device!r} (fi runs under SGLang on the CPU in this version)")
    if model_runner.use_mla_backend:
        reasons.append("an MLA model")
    if getattr(model_runner.model_config, "is_encoder_decoder", False):
        reasons.append("an encoder-decoder model")
    if reasons:
        raise UnsupportedError(f"not supported by fi under SGLang: {'; '.join(reasons)}. {_ADVICE}")


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
            f"attention layer {layer.layer_id}: not supported by fi: {'; '.join(reasons)}. {_ADVICE}"
        )


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for options that a model hands to a layer and that fi knows nothing of.

    Running without them would give wrong text.
    """
    active = sorted(name for name, value in options.items() if value is not None and value is not False)
    if active:
        raise UnsupportedError(f"options of the model not supported by fi: {', '.join(active)}. {_ADVICE}")


def refuse_cache(pool: Any, plain: Any, hybrid: Any) -> None:
    """Raise UnsupportedError unless the KV cache is token-major and unpacked.

    plain, hybrid: SGLang's MHATokenToKVPool and SWAKVPool. Subclasses lay their memory out differently.
    """
    parts: tuple[Any, ...] = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is hybrid else (pool,)
    for part in parts:
        if type(part) is not plain:
            raise UnsupportedError(
                f"KV cache of the kind {type(part).__name__}: not supported by fi. {_ADVICE}"
            )
        if (layout := getattr(part, "kv_cache_layout", "nhd")) != "nhd":
            raise UnsupportedError(f"KV cache layout {layout}: fi under SGLang reads nhd. {_ADVICE}")
        name = str(part.dtype).removeprefix("torch.")
        if name not in FLOAT_DTYPES + FP8_DTYPES or getattr(part, "is_quantized_kv_cache", False):
            raise UnsupportedError(f"kv_cache_dtype {name}: not supported by fi. {_ADVICE}")


def layer_spec(
    layer: Any,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    sinks: bool,
) -> AttentionSpec:
    """Return the spec of a RadixAttention layer.

    SGLang's sliding_window_size counts the keys before the query's own (-1: all), as window_left does.
    """
    window = layer.sliding_window_size
    return AttentionSpec(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        head_dim_v=layer.v_head_dim,
        dtype=dtype_name(dtype),
        kv_dtype=dtype_name(kv_dtype),
        page_size=page_size,
        scale=float(layer.scaling),
        window_left=-1 if window is None or window < 0 else int(window),
        logits_soft_cap=float(layer.logit_cap or 0.0),
        sinks=sinks,
    )


def step_limits(model_runner: Any) -> Limits:
    """Return what any step of this engine stays within.

    A step's budget of prompt tokens may be overshot by one whole prompt, and decoding requests join it.
    """
    arguments = model_runner.server_args
    rows, width = model_runner.req_to_token_pool.req_to_token.shape
    budget = max(arguments.max_prefill_tokens or 0, arguments.chunked_prefill_size or 0, 0)
    return Limits(max_requests=rows, max_tokens=budget + width + rows, max_kv_len=width)


def query_lengths(forward_batch: Any) -> list[int]:
    """Return the query tokens of each request of a step, host ints; a decoding request has one.

    Raises UnsupportedError for steps that fi does not plan.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        lengths = [1] * forward_batch.batch_size
    elif mode.name in ("EXTEND", "MIXED"):
        lengths = list(forward_batch.extend_seq_lens_cpu)
    else:
        raise UnsupportedError(f"forward mode {mode.name}: not supported by fi. {_ADVICE}")
    if forward_batch.spec_info is not None:
        raise UnsupportedError(f"speculative decoding: not supported by fi under SGLang. {_ADVICE}")
    return lengths


def indptr(lengths: list[int]) -> Tensor:
    """Return the running sum of `lengths` from 0, host int32 [requests + 1]."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), 0, dtype=torch.int32, out=starts[1:])
    return starts
