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
from shared_cases import Branch
from shared_serving import SharedServing, shared_case

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


PREFIXES: dict[str, tuple[str, list[Branch], int, dict[str, Any]]] = {
    # module, branches of the requests, CTAs, options
    "one prefix": ("128", [(0,)] * 6, 6, {}),
    "one prefix, one CTA": ("64", [(0,)] * 70, 1, {}),
    "two levels": ("64", [(0, 0), (0, 1), (0, 0), (1,), (0, 1), (1,)], 6, {"page_size": 1}),
    "wide heads": ("256", [(0,)] * 5, 6, {}),
    "fp8": ("e4m3 128", [(0,)] * 3 + [(0, 0)] * 2, 6, {"sinks": True}),
}


@pytest.fixture(scope="module", autouse=True)
def few_modules(needs_a_cuda_device: None) -> None:
    """Only what this file loads."""
    prepare(*(spec(name, 4, 2) for name in MODULES), device=device())


@pytest.mark.parametrize("kind", BATCHES)
def test_sanitizer_batch(kind: str) -> None:
    module, fields = BATCHES[kind]
    check(batch(spec=spec(module, 4, 2), **({"num_ctas": 6} | fields)), oracle_device="cpu")


@pytest.mark.parametrize("kind", PREFIXES)
def test_sanitizer_shared_prefixes(kind: str) -> None:
    module, paths, num_ctas, options = PREFIXES[kind]
    layer = spec(module, 4, 2, **options)
    q_lens = [1 + n % 3 % 2 for n in range(len(paths))]
    case = shared_case(layer, paths, {(0,): 128, (1,): 80, (0, 0): 48, (0, 1): 32}, q_lens, [9] * len(paths))
    engine = SharedServing(layer, [case])
    attn = engine.attention(num_ctas=num_ctas)
    engine.fill(case)
    assert engine.plan(attn, case).header["num_nodes"] > 0
    engine.run(attn)
    engine.check(case, engine.results(), expected=engine.expected(case, "cpu"))
    assert not counters(attn).any()


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


def test_sanitizer_faulty_prefixes() -> None:
    """The same where several requests depend on a row: of the table, of the lengths, of q."""
    only_on_cuda()
    layer = spec("64", 4, 2)
    case = shared_case(layer, [(0,)] * 5, {(0,): 64}, [1] * 5, [9] * 5)
    engine = SharedServing(layer, [case])
    attn = engine.attention(num_ctas=4)
    for tensor, at, value in (
        (engine.blocks, (0, 1), 10**6),
        (engine.blocks, (0, 1), -1),
        (engine.kv_lens, 0, 2**31 - 1),
        (engine.kv_lens, 0, 20),
        (engine.kv_lens, 2, 20),
        (engine.starts, 5, 9),
        (engine.starts, 1, 0),
    ):
        engine.fill(case)
        assert engine.plan(attn, case).header["num_nodes"] == 1
        tensor[at] = value
        engine.run(attn)
        out, _ = engine.results()
        assert out.isnan().any()
        assert counters(attn)[1] == (1 if tensor is engine.blocks else 2)
