# SPDX-License-Identifier: Apache-2.0
"""A step whose requests have a mask for each head, run on any device and compared head by head."""

from __future__ import annotations

from typing import Any

import torch
from attention_batch import SPLIT_COSTS
from numeric import assert_close, assert_lse_close
from oracle import attention, visible
from torch import Tensor

from fi_backend import AttentionSpec, BatchAttention, PageTable
from fi_backend.core.sharing import SharingLimits

HQ, HKV, PAGE = 6, 2, 16
Q_LENS = (3, 1, 0, 25, 1)
KV_LENS = (70, 130, 7, 64, 5)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


QO_INDPTR = int32([0, *Q_LENS]).cumsum(0).int()


class HeadMaskStep:
    """A batch of random requests with a mask [q_len, heads, kv_len] each.

    tree: every key before the queries is visible.
    """

    def __init__(
        self,
        heads: int,
        *,
        tree: bool = False,
        dtype: str = "float32",
        head_dim: int = 32,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        random = torch.Generator().manual_seed(heads)
        self.device = device
        options = {"causal": False, "dtype": dtype, "page_size": PAGE, "custom_mask": True} | options
        self.spec = AttentionSpec(HQ, HKV, head_dim, **options)
        requests, kind = len(KV_LENS), getattr(torch, dtype)
        pages = torch.randperm(requests * 9, generator=random).view(requests, 9)
        self.caches = torch.randn(2, requests * 9, PAGE, HKV, head_dim, generator=random).to(kind)
        self.q = torch.randn(sum(Q_LENS), HQ, head_dim, generator=random).to(kind)
        lens = int32(KV_LENS).to(device)
        self.table = PageTable.from_block_table(pages.int().to(device), lens, page_size=PAGE)
        self.keys, self.values = (
            [cache[pages[r]].flatten(0, 1)[:n] for r, n in enumerate(KV_LENS)] for cache in self.caches
        )
        self.masks = [
            torch.rand(q, heads, kv, generator=random) < 0.4 for q, kv in zip(Q_LENS, KV_LENS, strict=True)
        ]
        self.masks[0][1] = False  # a token that sees nothing
        self.masks[1][:, -1:] = torch.arange(KV_LENS[1]) < 64  # tiles that one head alone does not see
        if tree:
            for mask, q_len, kv_len in zip(self.masks, Q_LENS, KV_LENS, strict=True):
                mask[..., : kv_len - q_len] = True

    def check(self, custom_mask: Any, variant: str | None = None, **plan: Any) -> BatchAttention:
        """Run with `custom_mask` and compare every head with the oracle under `masks`."""
        runner = BatchAttention(
            self.spec,
            max_requests=len(Q_LENS),
            max_tokens=sum(Q_LENS),
            max_kv_len=max(KV_LENS),
            device=self.device,
            num_ctas=4,
            costs=SPLIT_COSTS,
            variant=variant,
            sharing=SharingLimits(4, 2, 30),
        )
        if not isinstance(custom_mask, Tensor | list):  # packed: nothing needs lengths on the host
            plan = {"custom_mask": custom_mask} | plan
        else:
            host = {"qo_indptr_host": QO_INDPTR, "kv_lens_host": int32(KV_LENS)}
            plan = {"custom_mask": custom_mask} | host | plan
        runner.plan(QO_INDPTR.to(self.device), self.table, **plan)
        lse = torch.full((sum(Q_LENS), HQ), torch.nan, device=self.device)
        scale = torch.linspace(0.5, 2, HQ) if variant else torch.ones(HQ)
        arguments = {"variant_args": {"scale": scale.to(self.device)}} if variant else {}
        k_cache, v_cache = self.caches.to(self.device)
        out = runner.run(self.q.to(self.device), k_cache, v_cache, lse=lse, **arguments)
        self.compare(out.cpu(), lse.cpu(), scale)
        return runner

    def compare(self, out: Tensor, lse: Tensor, scale: Tensor) -> None:
        for r, mask in enumerate(self.masks):
            rows = slice(int(QO_INDPTR[r]), int(QO_INDPTR[r + 1]))
            for head in range(HQ):
                seen = mask[:, head * mask.shape[1] // HQ]
                seen = visible(*seen.shape, self.spec.causal, self.spec.window_left, seen)
                kv = head * HKV // HQ
                q, k, v = self.q[rows, head, None], self.keys[r][:, kv, None], self.values[r][:, kv, None]
                rule: dict[str, Any] = {"causal": False, "mask": seen, "soft_cap": self.spec.logits_soft_cap}
                o, expected_lse = attention(q, k, v, **rule)
                amplitude, _ = attention(q, k, v.abs(), **rule)
                name, factor = f"request {r}, head {head}", float(scale[head])
                assert_close(name, out[rows, head, None], o * factor, amplitude=amplitude * factor)
                assert_lse_close(name, lse[rows, head, None], expected_lse)
