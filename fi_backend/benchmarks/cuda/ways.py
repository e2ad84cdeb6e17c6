# SPDX-License-Identifier: Apache-2.0
"""Other ways of ours beside a row: what each of them is given, and what its answer has to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fi_backend.benchmarks.cuda.cases import contiguous, single_tokens
from fi_backend.benchmarks.cuda.exact import Sample, sample_problem
from fi_backend.benchmarks.cuda.ours import PAGE1, RAGGED, VARIANTS, Prepared, prepare_ours
from fi_backend.benchmarks.peers import Problem
from fi_backend.benchmarks.variant_oracles import ORACLES
from fi_backend.variants import rope_frequencies

_WINDOW, _SINKS = 1024, 4


class Way(NamedTuple):
    """A way of ours. prepared: planned, ready to run. sample: float64 rows of its answer."""

    prepared: Prepared
    sample: Sample


def enter_way(name: str, problem: Problem, plain: Sample) -> Way:
    """Prepare the way called `name`: one of `ours.VARIANTS`, or a shipped variant of attention.

    plain: the sample of the problem as it stands. Raises ValueError for another name.
    """
    layer = len(problem.layers) - 1
    if name in ORACLES:
        arguments = variant_arguments(name, problem)
        sample = sample_problem(problem, layer, (ORACLES[name], arguments))
        if name == "sliding_window":
            # The planner does not see the variant's number.
            problem = replace(problem, spec=replace(problem.spec, window_left=_WINDOW - 1))
        return Way(prepare_ours(problem, name, arguments), sample)
    if name in (RAGGED, PAGE1):
        subject = contiguous(problem) if name == RAGGED else single_tokens(problem)
        return Way(prepare_ours(subject, name), sample_problem(subject, layer))
    if name not in VARIANTS:
        raise ValueError(f"name: expected one of {', '.join((*VARIANTS, *ORACLES))}; got {name!r}.")
    return Way(prepare_ours(problem, name), plain)


def variant_arguments(name: str, problem: Problem, *, seed: int = 0) -> dict[str, Any]:
    """Return arguments of a shipped variant as models have them: a window of 1024 keys, RoPE of Llama."""
    spec, device = problem.spec, problem.q.device
    heads, tokens = spec.num_qo_heads, problem.q.shape[0]
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    if name in ("rope", "rope_interleaved"):
        return {"frequencies": rope_frequencies(spec.head_dim, theta=5e5).to(device)}
    if name == "flash_sigmoid":
        return {"bias": -7.0}
    if name == "soft_cap":
        return {"cap": 5.0}
    if name == "alibi":
        return {"slopes": 2.0 ** (-8 * torch.arange(1, heads + 1, device=device) / heads)}
    if name == "channel_scales":
        sizes = {"key_scale": spec.head_dim, "value_scale": spec.head_dim_v, "value_offset": spec.head_dim_v}
        return {each: normal(spec.num_kv_heads, size).abs() + 0.5 for each, size in sizes.items()}
    if name == "logit_bias":
        return {"bias": normal(heads, tokens, int(problem.kv_lens.max()))}
    if name == "sliding_window":
        return {"window": _WINDOW}
    if name == "sink_window":
        return {"window": _WINDOW, "sink_tokens": _SINKS}
    if name == "qk_norm":
        return {"q_weight": normal(spec.head_dim), "k_weight": normal(spec.head_dim), "eps": 1e-6}
    if name == "output_scale":
        return {"scale": normal(heads)}
    if name == "output_gate":
        return {"gate": normal(tokens, heads, spec.head_dim_v).bfloat16()}
    raise ValueError(f"variant: expected one of {', '.join(ORACLES)}; got {name!r}.")
