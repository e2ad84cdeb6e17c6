# SPDX-License-Identifier: Apache-2.0
"""Steps of a layer with a shipped variant over tensors that stay where they are, its arguments among them."""

from __future__ import annotations

import torch
from gpu_device import device
from numeric import assert_close
from serving_step import MAX_KV, REQUESTS, TOKENS, Serving, Step
from torch import Tensor
from variant_cases import ORACLES, VariantBatch, arguments

from fi_backend import AttentionSpec, BatchAttention
from fi_backend.benchmarks.variant_oracles import Request

SPEC = AttentionSpec(4, 2, 64, dtype="bfloat16", page_size=16)


class VariantServing(Serving):
    """arguments: of the variant for the greatest step, on the device."""

    def __init__(self, name: str, seed: int = 0) -> None:
        super().__init__(SPEC, seed)
        self.oracle = ORACLES[name]
        greatest = VariantBatch(
            q_lens=(TOKENS, *(0,) * (REQUESTS - 1)),
            kv_lens=(MAX_KV,) * REQUESTS,
            heads=(SPEC.num_qo_heads, SPEC.num_kv_heads),
            head_dim=SPEC.head_dim,
            seed=seed,
        )
        self.arguments = {
            key: value.to(device()) if isinstance(value, Tensor) else value
            for key, value in arguments(name, greatest).items()
        }

    def run(self, attn: BatchAttention) -> None:
        attn.run(self.q, self.k, self.v, out=self.out, lse=self.lse, variant_args=self.arguments)

    def check(self, step: Step) -> None:
        """The output against the variant's definition; rows behind the batch must still be NaN."""
        out, lse = self.results()
        args = {
            key: value.cpu() if isinstance(value, Tensor) else value for key, value in self.arguments.items()
        }
        q, start = self.queries(step).double(), 0
        for index, (q_len, kv_len) in enumerate(zip(step.q_lens, step.kv_lens, strict=True)):
            k, v = (x.double().repeat_interleave(SPEC.group_size, 1) for x in self.gathered(index, kv_len))
            request = Request(
                q=q[start : start + q_len],
                k=k,
                v=v,
                q_pos=torch.arange(q_len) + kv_len - q_len,
                kv_pos=torch.arange(kv_len),
                scale=SPEC.scale,
                index=index,
                tokens=torch.arange(start, start + q_len),
            )
            o, amplitude = self.oracle.attention(request, args)
            assert_close("out", out[start : start + q_len], o, amplitude=amplitude, slack=2.0)
            start += q_len
        assert out[start:].isnan().all(), "rows behind the batch were written"
        assert lse[start:].isnan().all(), "rows behind the batch were written"
