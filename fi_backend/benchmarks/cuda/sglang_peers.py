# SPDX-License-Identifier: Apache-2.0
"""SGLang's Triton kernels as its deterministic mode calls them, beside our batch-invariant mode."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fi_backend.benchmarks.cuda.cases import slots
from fi_backend.benchmarks.peers import Peer, Problem, Run
from fi_backend.errors import UnsupportedError

_SPLIT_TOKENS = 256  # the default of its deterministic mode


class Deterministic(Peer):
    """Decode in splits of 256 tokens, everything else by the kernel with one stage."""

    name = "sglang-deterministic"

    def unavailable(self) -> str | None:
        """Return what is missing, or None."""
        if importlib.util.find_spec("sglang") is None:
            return "sglang is not installed"
        try:
            _kernels()
        except (ImportError, AttributeError, RuntimeError) as error:
            return f"this sglang has no such Triton kernels ({error})"
        return None

    def prepare(self, problem: Problem) -> Run:
        """Write the token slots of the step and the number of splits."""
        if not problem.spec.batch_invariant:
            raise UnsupportedError("measured where the answer may not depend on the batch")
        decode, extend = _kernels()
        lens = problem.kv_lens
        indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
        indptr[1:] = lens.cumsum(0)
        indices = slots(problem)
        out = torch.empty_like(problem.q)
        spec = problem.spec
        caches = [
            (
                key.view(-1, spec.num_kv_heads, spec.head_dim),
                value.view(-1, spec.num_kv_heads, spec.head_dim_v),
            )
            for key, value in problem.layers
        ]
        q_lens = problem.qo_indptr.diff()
        if int(q_lens.max()) == 1:
            splits = (lens + _SPLIT_TOKENS - 1) // _SPLIT_TOKENS
            most = int(splits.max())
            shape = (lens.shape[0], spec.num_qo_heads, most)
            partial = torch.empty(*shape, spec.head_dim_v, dtype=torch.float32, device=lens.device)
            partial_lse = torch.empty(shape, dtype=torch.float32, device=lens.device)

            def run_decode(layer: int) -> Tensor:
                key, value = caches[layer]
                decode(
                    *(problem.q, key, value, out, indptr, indices, partial, partial_lse, splits, most),
                    *(spec.scale, 1.0, 1.0),
                )
                return out

            return run_decode
        before = lens - q_lens
        longest = int(q_lens.max())

        def run_extend(layer: int) -> Tensor:
            key, value = caches[layer]
            extend(
                *(problem.q, out, key, value, 1.0, 1.0, problem.qo_indptr, indptr, indices, before, longest),
                sm_scale=spec.scale,
            )
            return out

        return run_extend


def _kernels() -> tuple[Any, Any]:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

    return decode_attention_fwd, extend_attention_fwd_unified


def fi_backend_benchmark_peers(device: str) -> Sequence[Peer]:
    """Offer the kernels on CUDA devices."""
    return [Deterministic()] if device == "cuda" else []
