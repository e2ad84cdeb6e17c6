# SPDX-License-Identifier: Apache-2.0
"""vLLM's words for an attention layer and for the size of a step, in the words of the core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from fi_backend.adapters.layer_variants import KEY, Asked, asked_for
from fi_backend.core.planner import Limits
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import UnsupportedError
from fi_backend.hooks import AttentionLayer

from . import compat

_KV_DTYPES: Final = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
# Query tokens, beside those of decoding, of requests that ask a short question about a cached text.
_SHORT_PREFILLS: Final = 256


def layer_spec(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    block_size: int,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi: bool,
    sinks: bool,
    batch_invariant: bool,
) -> AttentionSpec:
    """Return the spec of a decoder attention layer.

    sliding_window counts the keys that a query sees, its own included, as vLLM's does; None: all.
    Raises UnsupportedError for a KV cache dtype that the kernels do not read.
    """
    if kv_cache_dtype != "auto" and kv_cache_dtype not in _KV_DTYPES:
        raise UnsupportedError(
            f"kv_cache_dtype: expected auto, {', '.join(_KV_DTYPES)}; got {kv_cache_dtype}."
        )
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_size,
        dtype=str(dtype),
        kv_dtype=_KV_DTYPES.get(kv_cache_dtype, str(dtype)),
        page_size=block_size,
        scale=scale,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        logits_soft_cap=logits_soft_cap or 0.0,
        alibi=alibi,
        sinks=sinks,
        batch_invariant=batch_invariant,
    )


def asked_variant(vllm_config: Any) -> Asked:
    """Return the variant that `--additional-config` asks for, else the configuration of the model.

    Raises TypeError or ValueError for what cannot be read.
    """
    given = getattr(vllm_config, "additional_config", None)
    if isinstance(given, Mapping) and KEY in given:
        return asked_for("additional_config", given[KEY])
    return asked_for("hf_config", getattr(_hf_config(vllm_config), KEY, None))


def describe_layer(
    name: str, spec: AttentionSpec, device: torch.device, vllm_config: Any, asked: Asked
) -> AttentionLayer:
    """Return a layer as plug-ins see it; name: vLLM's, such as "model.layers.3.self_attn.attn"."""
    ranks = getattr(vllm_config.parallel_config, "tensor_parallel_size", 1)
    return AttentionLayer(
        engine="vllm",
        name=name,
        index=next((int(part) for part in name.split(".") if part.isdecimal()), None),
        spec=spec,
        device=device,
        tensor_parallel=(compat.tensor_parallel_rank() if ranks > 1 else 0, ranks),
        hf_config=_hf_config(vllm_config),
        variant=asked.variant,
        variant_args=asked.args,
    )


def _hf_config(vllm_config: Any) -> Any:
    return getattr(vllm_config.model_config, "hf_config", None)


def refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a layer option that is on and that the kernels know nothing of.

    Models hand such options straight to the layer, past vLLM's check of the configuration; running
    without them would give wrong text.
    """
    active = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != -1
    }
    if active:
        shown = ", ".join(f"{name}={value!r}" for name, value in active.items())
        raise UnsupportedError(
            f"attention layer options not supported by fi: {shown}. Choose another --attention-backend."
        )


def refuse_sleep_mode(vllm_config: Any) -> None:
    """Raise UnsupportedError when vLLM may throw away memory that was allocated while it built the model.

    It restores weights and buffers of modules, and knows nothing of scales, slopes and arguments of variants.
    """
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise UnsupportedError(
            "enable_sleep_mode: not supported by fi, whose memory may hold anything after sleeping. "
            "Leave sleep mode off, or choose another --attention-backend."
        )


def refuse_micro_batches(vllm_config: Any) -> None:
    """Raise UnsupportedError when vLLM runs the two halves of a step at the same time.

    They would share one scratch memory, and the index arrays of the second half are new tensors in every
    step, which a captured graph cannot follow.
    """
    if getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise UnsupportedError(
            "enable_dbo, ubatch_size: steps split into micro-batches are not supported by fi. Leave dual "
            "batch overlap off, or choose another --attention-backend."
        )


def draft_tokens(vllm_config: Any) -> int:
    """Return how many tokens a draft model may append to a request within one step."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return 0
    # Twice: parallel drafting adds as many mask slots again.
    return 2 * ((speculation.num_speculative_tokens or 0) + 1)


def step_limits(vllm_config: Any, *, attention_chunk_size: int | None = None) -> Limits:
    """Return what any step of this engine stays within.

    attention_chunk_size: for chunked local attention, where vLLM turns every chunk of a request that a
    step touches into a request of its own.
    """
    requests = vllm_config.scheduler_config.max_num_seqs
    drafts = draft_tokens(vllm_config)
    tokens = vllm_config.scheduler_config.max_num_batched_tokens + drafts * requests
    if attention_chunk_size is not None:
        requests = 2 * requests + -(-tokens // attention_chunk_size)
    return Limits(
        max_requests=requests, max_tokens=tokens, max_kv_len=vllm_config.model_config.max_model_len + drafts
    )


def sharing_limits(vllm_config: Any, limits: Limits) -> SharingLimits | None:
    """Return the capacity for shared prefixes in steps within `limits`, or None where there are none.

    Requests begin with the same blocks where vLLM's prefix cache gives them the same. Where sharing is left
    out, memory stays as it is with it.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        return None
    speculation = vllm_config.speculative_config
    drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
    return SharingLimits(
        max_nodes=limits.max_requests,
        max_levels=3,
        max_tokens=min(limits.max_tokens, limits.max_requests * (1 + drafts) + _SHORT_PREFILLS),
    )
