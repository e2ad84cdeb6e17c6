# SPDX-License-Identifier: Apache-2.0
"""One small batch of every kind of work, short enough for compute-sanitizer (see scripts/gpu_tests.sh).

The oracle computes on the host, so that the kernels under the tool are ours and torch's copies.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_batch import check, counters
from engine_memory import Layout
from gpu_batches import batch
from gpu_device import device, int32, only_on_cuda, starts_of
from gpu_specs import spec

from fi_backend.core.append import append_kv
from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.prepare import prepare

pytestmark = pytest.mark.gpu

MODULES = ("64", "128", "256", "e4m3 128", "invariant 128", "transform mask 64")
BATCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "decode, split": ("128", {"q_lens": (1, 1), "kv_lens": (300, 70)}),
    "decode, many keys": ("64", {"q_lens": (1,), "kv_lens": (1200,), "num_ctas": 1}),
    "mixed": ("64", {"q_lens": (1, 20, 3), "kv_lens": (200, 40, 130)}),
    "prefill": ("128", {"q_lens": (70,), "kv_lens": (140,), "num_ctas": 2}),
    "tall tiles": ("64", {"q_lens": (150,), "kv_lens": (150,), "num_ctas": 1}),
    "tall and short tiles": (
        "64", {"q_lens": (150, 50, 150, 1), "kv_lens": (150, 60, 150, 200), "num_ctas": 1},
    ),
    "wide heads": ("256", {"q_lens": (1, 20), "kv_lens": (200, 70)}),
    "fp8": ("e4m3 128", {"q_lens": (1, 20), "kv_lens": (200, 70), "k_scale": 0.5}),
    "invariant": ("invariant 128", {"q_lens": (1, 20), "kv_lens": (300, 130)}),
    "invariant, queues": (
        "invariant 128", {"q_lens": (1, 40), "kv_lens": (300, 40), "planned_queues": True},
    ),
    "mask, ALiBi": ("transform mask 64", {"q_lens": (1, 9), "kv_lens": (100, 70)}),
    "token table, packed": (
        "64",
        {"q_lens": (1, 9), "kv_lens": (100, 70), "layout": Layout(table="token", k="packed", v="packed")},
    ),
    "contiguous": ("128", {"q_lens": (1, 9), "kv_lens": (100, 70), "layout": Layout(table="ragged")}),
    "device plan": ("64", {"q_lens": (1, 9), "kv_lens": (100, 70), "host_lengths": False}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def few_modules(needs_a_cuda_device: None) -> None:
    """Only what this file loads."""
    prepare(*(spec(name, 4, 2) for name in MODULES), device=device())


@pytest.mark.parametrize("kind", BATCHES)
def test_sanitizer_batch(kind: str) -> None:
    module, fields = BATCHES[kind]
    check(batch(spec=spec(module, 4, 2), **({"num_ctas": 6} | fields)), oracle_device="cpu")


def test_sanitizer_append() -> None:
    cache = torch.zeros(4, 16, 2, 128, dtype=torch.bfloat16, device=device())
    x = torch.ones(9, 2, 64, device=device())
    append_kv(x, x, cache[..., :64], cache[..., 64:], torch.arange(5, 14, device=device()))
    assert cache.cpu().float().sum() == 9 * 2 * 128


def test_sanitizer_faulty_tables_and_lengths() -> None:
    """Ids and lengths outside of everything: the tool sees whether one is followed."""
    only_on_cuda()
    layer = spec("64", 4, 2)
    k, v = torch.zeros(2, 12, 16, 2, 64, dtype=torch.bfloat16, device=device())
    q = torch.zeros(5, 4, 64, dtype=torch.bfloat16, device=device())
    attn = BatchAttention(layer, max_requests=3, max_tokens=5, max_kv_len=64, device=device(), num_ctas=4)
    starts, lens = starts_of((1, 1, 3)), int32(64, 64, 64)
    for page, kv_len, end in (
        (12, 64, 5),
        (-1, 64, 5),
        (2**31 - 1, 64, 5),
        (3, 65, 5),
        (3, -1, 5),
        (3, 64, 9),
    ):
        blocks = torch.arange(12, dtype=torch.int32).view(3, 4)
        blocks[1, 2] = page
        actual_lens, actual_starts = lens.clone(), starts.clone()
        actual_lens[1], actual_starts[3] = kv_len, end
        table = PageTable.from_block_table(blocks.to(device()), actual_lens.to(device()), page_size=16)
        attn.plan(actual_starts.to(device()), table, qo_indptr_host=starts, kv_lens_host=lens)
        out = attn.run(q, k, v, out=torch.full_like(q, 7.0)).cpu()
        assert (out[0] == 0).all()
        assert out[1].isnan().all() == (end == 5)
        assert counters(attn)[1] == (1 if kv_len == 64 and end == 5 else 2)
