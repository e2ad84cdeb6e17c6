# SPDX-License-Identifier: Apache-2.0
"""Masks that are packed on the device: one captured graph verifies trees of drafts, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_device import capture, device, int32, no_waiting, starts_of, synchronize
from gpu_specs import spec
from numeric import assert_close
from oracle import attention
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.mask_buffer import MaskBuffer
from fi_backend.core.page_table import PageTable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]

DRAFTS, PAGE, WIDTH, REQUESTS = 6, 16, 40, 3
STEPS = ((6, 200, 633), (70, 7, 640), (640, 6, 16))


class Verification:
    """Requests of DRAFTS queries each, whose lengths and masks lie at fixed addresses."""

    def __init__(self) -> None:
        self.spec = spec("mask 128", 8, 2, page_size=PAGE)
        self.random = torch.Generator().manual_seed(2)
        dtype = getattr(torch, self.spec.dtype)
        pages = torch.randperm(REQUESTS * WIDTH, generator=self.random).reshape(REQUESTS, WIDTH) + 1
        self.pages = pages
        caches = torch.randn(2, REQUESTS * WIDTH + 1, PAGE, 2, 128, generator=self.random)
        caches[:, 0] = torch.nan
        self.k_cache, self.v_cache = caches.to(device(), dtype)
        self.q = torch.empty(REQUESTS * DRAFTS, 8, 128, dtype=dtype, device=device())
        self.out = torch.empty_like(self.q)
        self.kv_lens = int32(*STEPS[0]).to(device())
        self.qo_indptr = starts_of([DRAFTS] * REQUESTS).to(device())
        self.trees = torch.ones(REQUESTS * DRAFTS * DRAFTS, dtype=torch.bool, device=device())
        self.masks = MaskBuffer(
            max_requests=REQUESTS, max_q_len=DRAFTS, max_kv_len=WIDTH * PAGE, device=device()
        )
        self.table = PageTable.from_block_table(pages.int().to(device()), self.kv_lens, page_size=PAGE)
        self.attention = BatchAttention(
            self.spec, max_requests=REQUESTS, max_tokens=64, max_kv_len=WIDTH * PAGE, device=device()
        )

    def fill(self, kv_lens: tuple[int, ...]) -> Tensor:
        """A new step; returns its trees, [requests, DRAFTS, DRAFTS]."""
        trees = (torch.rand(REQUESTS, DRAFTS, DRAFTS, generator=self.random) < 0.5).tril_()
        trees.diagonal(dim1=1, dim2=2).fill_(True)
        self.trees.copy_(trees.reshape(-1))
        self.kv_lens.copy_(int32(*kv_lens))
        self.q.copy_(torch.randn(self.q.shape, generator=self.random))
        self.out.fill_(torch.nan)
        return trees

    def step(self) -> None:
        packed = self.masks.pack(self.trees, self.qo_indptr, self.kv_lens, tree=True)
        self.attention.plan(self.qo_indptr, self.table, custom_mask=packed)
        self.attention.run(self.q, self.k_cache, self.v_cache, out=self.out)

    def check(self, trees: Tensor, kv_lens: tuple[int, ...]) -> None:
        synchronize()
        for request, kv in enumerate(kv_lens):
            rows = slice(request * DRAFTS, (request + 1) * DRAFTS)
            keys, values = (
                cache.cpu()[self.pages[request]].flatten(0, 1)[:kv] for cache in (self.k_cache, self.v_cache)
            )
            mask = torch.ones(DRAFTS, kv, dtype=torch.bool)
            mask[:, kv - DRAFTS :] = trees[request]
            rule: dict[str, Any] = {"mask": mask, "scale": self.spec.scale}
            expected, _ = attention(self.q[rows].cpu(), keys, values, **rule)
            amplitude, _ = attention(self.q[rows].cpu(), keys, values.abs(), **rule)
            assert_close(f"request {request}", self.out[rows].cpu(), expected, amplitude=amplitude)


def test_a_graph_verifies_the_trees_of_each_replay() -> None:
    verification = Verification()
    verification.fill(STEPS[0])
    verification.step()
    replay: Callable[[], Any] = capture(verification.step)
    for kv_lens in STEPS:
        trees = verification.fill(kv_lens)
        replay()
        verification.check(trees, kv_lens)


def test_packing_waits_for_nothing() -> None:
    verification = Verification()
    verification.fill(STEPS[0])
    verification.step()
    trees = verification.fill(STEPS[1])
    with no_waiting():
        verification.step()
    verification.check(trees, STEPS[1])
