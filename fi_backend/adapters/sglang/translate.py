# SPDX-License-Identifier: Apache-2.0
"""SGLang's words for an attention layer, an engine and a step, in the words of the core.

Attributes are read by name, so that this module imports no part of SGLang.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fi_backend.adapters.layer_variants import KEY, Asked, asked_for
from fi_backend.core.planner import Limits
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec, dtype_name
from fi_backend.errors import UnsupportedError
from fi_backend.hooks import AttentionLayer

from . import compat
from .refuse import ADVICE

# Requests whose prefixes have room in the scratch memory; SGLang allows thousands in a step.
_MOST_SHARING: Final = 1024


def layer_spec(
    layer: Any,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    sinks: bool = False,
    custom_mask: bool = False,
    batch_invariant: bool = False,
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
        custom_mask=custom_mask,
        batch_invariant=batch_invariant,
    )


def asked_variant(model_runner: Any) -> Asked:
    """Return the variant that the model's configuration asks for, which --json-model-override-args changes.

    Raises TypeError or ValueError for what cannot be read.
    """
    return asked_for("hf_config", getattr(_hf_config(model_runner), KEY, None))


def describe_layer(
    name: str, layer: Any, spec: AttentionSpec, device: torch.device, model_runner: Any, asked: Asked
) -> AttentionLayer:
    """Return a RadixAttention layer as plug-ins see it; name: of the module in the model."""
    ranks = getattr(model_runner.server_args, "tp_size", 1)
    return AttentionLayer(
        engine="sglang",
        name=name,
        index=layer.layer_id,
        spec=spec,
        device=device,
        tensor_parallel=(compat.tensor_parallel_rank() if ranks > 1 else 0, ranks),
        hf_config=_hf_config(model_runner),
        variant=asked.variant,
        variant_args=asked.args,
    )


def _hf_config(model_runner: Any) -> Any:
    return getattr(model_runner.model_config, "hf_config", None)


def draft_tokens(model_runner: Any) -> int:
    """Return how many tokens of a request one step may verify; 0 without speculation."""
    arguments = model_runner.server_args
    if getattr(arguments, "speculative_algorithm", None) is None:
        return 0
    drafts = getattr(arguments, "max_speculative_num_draft_tokens", None)
    return int(drafts or arguments.speculative_num_draft_tokens or 1)


def verifies_trees(model_runner: Any) -> bool:
    """Return whether verifications come with masks: those of drafts that branch, and of NGRAM always."""
    arguments = model_runner.server_args
    algorithm = str(getattr(arguments, "speculative_algorithm", None)).upper()
    return algorithm == "NGRAM" or getattr(arguments, "speculative_eagle_topk", None) != 1


def step_limits(model_runner: Any) -> Limits:
    """Return what any step of this engine stays within.

    A step's budget of prompt tokens may be overshot by one whole prompt, and decoding requests join it.
    """
    arguments = model_runner.server_args
    rows, width = model_runner.req_to_token_pool.req_to_token.shape
    budget = max(arguments.max_prefill_tokens or 0, arguments.chunked_prefill_size or 0, 0)
    tokens = budget + width + rows * max(1, draft_tokens(model_runner))
    return Limits(max_requests=rows, max_tokens=tokens, max_kv_len=width)


def shares_prefixes(model_runner: Any) -> bool:
    """Return whether steps of this engine could read the prefixes that requests share once for all of them.

    Drafts are left out: their caches are not in the radix tree of the model.
    """
    arguments = model_runner.server_args
    return (
        not getattr(arguments, "disable_radix_cache", False)
        and getattr(arguments, "speculative_algorithm", None) is None
        and getattr(arguments, "pp_size", 1) in (None, 1)  # micro-batches are under way together
    )


def sharing_limits(limits: Limits) -> SharingLimits:
    """Return the capacity for shared prefixes in steps within `limits`: for every node of their tree."""
    requests = min(limits.max_requests, _MOST_SHARING)
    return replace(SharingLimits.for_limits(requests, limits.max_tokens), max_nodes=requests)


class Lengths(NamedTuple):
    """The lengths of a step, as SGLang states them.

    width: query tokens of every request, or None where they differ: q_lens (integers, on the step's device)
        and, where the host knows them, q_lens_host. more_kv: KV tokens that seq_lens leaves out.
    """

    width: int | None
    q_lens: Tensor | None = None
    q_lens_host: list[int] | None = None
    more_kv: int = 0


def step_lengths(forward_batch: Any, draft_step: int | None = None) -> Lengths:
    """Return the lengths of a step; raises UnsupportedError for steps that fi does not plan.

    draft_step: which of its steps a draft model takes, from 0; None for all other steps.
    """
    mode, spec_info = forward_batch.forward_mode.name, forward_batch.spec_info
    if mode == "DECODE" and (draft_step is None) == (spec_info is None):
        # Each step of a draft appends the token that it reads.
        return Lengths(1, more_kv=0 if draft_step is None else draft_step + 1)
    if mode in ("EXTEND", "MIXED"):
        return Lengths(None, forward_batch.extend_seq_lens, forward_batch.extend_seq_lens_cpu)
    if mode == "TARGET_VERIFY" and getattr(spec_info, "ragged_verify_layout", None) is None:
        drafts = int(spec_info.draft_token_num)
        return Lengths(drafts, more_kv=drafts)
    if mode == "DRAFT_EXTEND_V2":
        for source, tensor, host in (
            (spec_info, "extend_seq_lens_tensor", "extend_seq_lens_cpu"),
            (forward_batch, "extend_seq_lens", "extend_seq_lens_cpu"),
        ):
            if (q_lens := getattr(source, tensor, None)) is not None:
                return Lengths(None, q_lens, getattr(source, host, None))
        return Lengths(int(spec_info.num_tokens_per_req))
    speculative = "" if spec_info is None else f" with {type(spec_info).__name__}"
    raise UnsupportedError(f"forward mode {mode}{speculative}: not supported by fi. {ADVICE}")


def indptr(lengths: list[int]) -> Tensor:
    """Return the running sum of `lengths` from 0, host int32 [requests + 1]."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device="cpu")
    counts = torch.tensor(lengths, dtype=torch.int32, device="cpu")
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    return starts
