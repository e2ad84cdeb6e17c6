# SPDX-License-Identifier: Apache-2.0
"""The source of the CUDA attention kernel on an emulated GPU: roles, barriers, rings, fragments, merges.

`pytest tests/gpu/test_cuda_attention*.py --gpu-tests-on=sm_90a` runs the GPU's own tests there (minutes).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import emulator_modules
import pytest
import torch
from attention_batch import SPLIT_COSTS, Batch, check
from attention_strategies import ROOMY
from engine_memory import Layout
from numeric import assert_bitwise_equal
from sequences import Sequence, compute

from fi_backend import BatchAttention, PageTable
from fi_backend.core import jit, kernels
from fi_backend.core.planner import CostModel
from fi_backend.core.sharing import flat_reason
from fi_backend.core.spec import AttentionSpec

SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "wgmma": ("sm_90a", {"head_dim": 80}),
    "two tiles a step": ("sm_90a", {"head_dim": 64}),
    "heads of 128": ("sm_90a", {"head_dim": 128}),
    "fp8, mma": ("sm_80", {"head_dim": 64, "dtype": "float16", "kv_dtype": "float8_e5m2"}),
    "mma": ("sm_80", {"head_dim": 64, "dtype": "float16"}),
    "little shared memory": ("sm_86", {"head_dim": 128}),
    "wide heads": ("sm_90a", {"head_dim": 192, "head_dim_v": 128}),
    "heads of 256": ("sm_90a", {"head_dim": 256}),
    "fp8": ("sm_90a", {"head_dim": 80, "kv_dtype": "float8_e4m3fn"}),
    "masks and transforms": ("sm_90a", {"head_dim": 64, "custom_mask": True, "logits_soft_cap": 20.0}),
    "batch-invariant": ("sm_80", {"head_dim": 64, "batch_invariant": True}),
    "batch-invariant, wgmma": ("sm_90a", {"head_dim": 64, "dtype": "float16", "batch_invariant": True}),
    "batch-invariant, heads of 80": ("sm_90a", {"head_dim": 80, "batch_invariant": True}),
    "batch-invariant, fp8": (
        "sm_90a",
        {"head_dim": 64, "kv_dtype": "float8_e4m3fn", "batch_invariant": True},
    ),
}


def layer(name: str, **options: Any) -> AttentionSpec:
    return AttentionSpec(**{"num_qo_heads": 6, "num_kv_heads": 2, "page_size": 16} | SPECS[name][1] | options)


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile them side by side."""
    jit.build_all([emulator_modules.attention_module(layer(name), arch) for name, (arch, _) in SPECS.items()])


@pytest.fixture(params=SPECS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A spec whose module takes the place of the CPU's."""
    monkeypatch.setattr(kernels, "_ready", set())
    emulator_modules.install(SPECS[request.param][0], monkeypatch.setattr)
    return request.param


def batch(spec: AttentionSpec, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], **fields: Any) -> Batch:
    return Batch(spec=spec, q_lens=q_lens, kv_lens=kv_lens, num_ctas=24, **fields)


@pytest.mark.parametrize("num_ctas", [1, 24])
def test_decodes_chunks_and_prefills_in_one_step(name: str, num_ctas: int) -> None:
    """More queries than keys, no queries, no keys, tiles of every height, chunks or none."""
    q_lens, kv_lens = (1, 150, 5, 1, 0, 40, 2, 1), (333, 150, 700, 0, 90, 17, 65, 64)
    check(replace(batch(layer(name), q_lens, kv_lens, costs=SPLIT_COSTS), num_ctas=num_ctas))


def test_windows_sinks_scattered_pages_and_queues(name: str) -> None:
    spec = layer(name, page_size=3, window_left=70, sinks=True)
    layout = Layout(table="token", k="hnd", v="packed", q="qkv", out="heads", first_token=2, extra_tokens=3)
    q_lens, kv_lens = (1, 33, 3, 2), (500, 200, 64, 129)
    slack = () if spec.custom_mask else (0, 0, 30, 0)
    fields = {"costs": SPLIT_COSTS, "layout": layout, "planned_queues": True, "bound_slack": slack}
    check(batch(spec, q_lens, kv_lens, **fields))


@pytest.mark.parametrize(
    "name", ["wgmma", "mma", "wide heads", "fp8", "two tiles a step", "heads of 128"], indirect=True
)
def test_a_prefill_of_many_laps_of_the_ring(name: str) -> None:
    """A stage that is given back too early is overwritten under products that are still to come."""
    spec = layer(name, num_qo_heads=4, num_kv_heads=2)
    check(replace(batch(spec, (250, 130), (2000, 1500)), num_ctas=3))


def test_prefixes_read_once(name: str) -> None:
    """Two levels, requests in any order, one that shares nothing."""
    spec = layer(name, page_size=16)
    if flat_reason(spec):
        pytest.skip("planned flat by rule")
    shares = ((0, 0), (0, 9), (0, 5), (0, 0), (1, 12), (2, 7))
    own = (9 * 16 + 20, 70, 33, 90, 15, 40)
    state = check(
        batch(
            spec,
            (1, 2, 1, 3, 1, 1),
            tuple(16 * pages + n for (_, pages), n in zip(shares, own, strict=True)),
            shares=shares,
            sharing=ROOMY,
            costs=replace(SPLIT_COSTS, alpha=0, part_cost=0),
        )
    )
    assert state.plan.header["num_nodes"] >= 2


@pytest.mark.parametrize("name", ["wgmma", "fp8, mma", "two tiles a step", "heads of 128"], indirect=True)
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (6, 2), (20, 4)])
def test_many_short_requests_in_bundles_of_heads(name: str, heads: int, kv_heads: int) -> None:
    spec = layer(name, num_qo_heads=heads, num_kv_heads=kv_heads, page_size=16)
    shares = ((0, 0), (0, 9)) + ((1, 12), (0, 9), (0, 5)) * 5
    own = (9 * 16 + 20, 90, *(15 + 13 * i % 70 for i in range(15)))
    kv_lens = tuple(16 * pages + n for (_, pages), n in zip(shares, own, strict=True))
    costs = replace(CostModel.for_device("cuda"), share_cost=0, share_latency=0)
    composed = batch(spec, (1, 2, 1, 1, 1) * 3 + (1, 1), kv_lens, shares=shares, sharing=ROOMY, costs=costs)
    state = check(replace(composed, num_ctas=3))
    assert state.plan.header["num_nodes"] >= 2
    assert state.plan.header[f"bundled_by_{min(kv_heads, 4)}"] > 0


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("name", ["mma", "fp8", "wgmma"], indirect=True)
def test_a_key_that_outweighs_all_others_does_not_drown_them(name: str, q_len: int) -> None:
    """Weights of 2^-27 are zero as halfs; an attention sink without a value of its own leaves it to them."""
    kv_len, spec = 1000, layer(name)
    q = torch.ones(q_len, 6, spec.head_dim, dtype=getattr(torch, spec.dtype))
    kv = torch.zeros(2, -(-kv_len // 16), 16, 2, spec.head_dim, dtype=getattr(torch, spec.kv_dtype))
    k, v = kv.flatten(1, 2)
    logit = 19.0
    k[0] = logit / (spec.scale * spec.head_dim)
    v[1 : kv_len - q_len] = 1.0  # those that all rows see
    attn = BatchAttention(spec, max_requests=1, max_tokens=q_len, max_kv_len=kv_len)
    lens = torch.tensor([kv_len], dtype=torch.int32)
    pages = torch.arange(kv.shape[1], dtype=torch.int32)[None]
    table = PageTable.from_block_table(pages, lens, page_size=16)
    attn.plan(torch.tensor([0, q_len], dtype=torch.int32), table)
    sink = math.exp(float(k[0, 0, 0]) * spec.scale * spec.head_dim)
    seen = torch.arange(kv_len - q_len, kv_len)[:, None, None]  # beside the sink
    expected = (kv_len - q_len - 1) / (sink + seen.double())
    out = attn.run(q, *kv).double() * (sink / kv_len)
    torch.testing.assert_close(out, (expected * (sink / kv_len)).expand_as(out), rtol=0.02, atol=0)


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("name", ["mma", "fp8"], indirect=True)
def test_weights_stay_finite_where_logits_are_more_than_one_apart(name: str, q_len: int) -> None:
    """Beyond 2^24 exponents are off by several units; all keys weigh the same, and none may be infinite."""
    spec, kv_len, key = layer(name), 200, 400.0
    greatest = 2.0**28 * math.log(2) / (key * spec.head_dim * spec.scale)  # query elements of logits of 2^28
    sizes = torch.linspace(0.06, 0.95, q_len * 6).reshape(q_len, 6, 1) * greatest
    q = sizes.expand(-1, -1, spec.head_dim).to(getattr(torch, spec.dtype)).contiguous()
    kv = torch.ones(2, -(-kv_len // 16), 16, 2, spec.head_dim)
    kv[0] = key
    attn = BatchAttention(spec, max_requests=1, max_tokens=q_len, max_kv_len=kv_len)
    lens = torch.tensor([kv_len], dtype=torch.int32)
    pages = torch.arange(kv.shape[1], dtype=torch.int32)[None]
    table = PageTable.from_block_table(pages, lens, page_size=16)
    attn.plan(torch.tensor([0, q_len], dtype=torch.int32), table)
    out = attn.run(q, *kv.to(getattr(torch, spec.kv_dtype))).float()
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", [name for name in SPECS if "batch-invariant" in name], indirect=True)
def test_a_token_alone_has_the_bits_that_it_has_in_a_tile_of_128_rows(name: str) -> None:
    """Warpgroups or one warp compute rows of tall tiles; of some modules, all warps a tile of few rows."""
    spec, costs = layer(name), replace(SPLIT_COSTS, invariant_grid=128)
    sequence = Sequence.random(spec, 700, 0)
    [together] = compute(spec, [(sequence, 650, 700)], num_ctas=1, costs=costs)
    for begin, end, num_ctas in ((699, 700, 1), (699, 700, 24), (690, 695, 3), (651, 653, 24)):
        [alone] = compute(spec, [(sequence, begin, end)], num_ctas=num_ctas, costs=costs)
        for mine, all_rows in zip(alone, together, strict=True):
            assert_bitwise_equal("rows", mine, all_rows[begin - 650 : end - 650])


@pytest.mark.parametrize("name", ["heads of 128", "fp8", "heads of 256"], indirect=True)
def test_few_rows_lose_nothing_but_the_rounding_of_their_output(name: str) -> None:
    """Weights of 8 bits alone, as bfloat16 has, make the error 1.2 times as large."""
    spec, kv_len = layer(name), 300
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(1, 6, spec.head_dim, generator=generator).to(getattr(torch, spec.dtype))
    kv = torch.randn(2, -(-kv_len // 16), 16, 2, spec.head_dim, generator=generator)
    kv = kv.to(getattr(torch, spec.kv_dtype))
    attn = BatchAttention(spec, max_requests=1, max_tokens=1, max_kv_len=kv_len)
    lens = torch.tensor([kv_len], dtype=torch.int32)
    pages = torch.arange(kv.shape[1], dtype=torch.int32)[None]
    attn.plan(torch.tensor([0, 1], dtype=torch.int32), PageTable.from_block_table(pages, lens, page_size=16))
    k, v = (side.flatten(0, 1)[:kv_len].double().repeat_interleave(3, dim=1).transpose(0, 1) for side in kv)
    exact = (torch.softmax(k @ q[0].double()[..., None] * spec.scale, dim=1) * v).sum(1)
    rounded = exact.to(q.dtype).double()
    error = (attn.run(q, *kv)[0].double() - exact).square().mean().sqrt()
    assert error <= 1.05 * (rounded - exact).square().mean().sqrt()


@pytest.mark.parametrize("name", ["heads of 128", "fp8", "wgmma"], indirect=True)
def test_infinite_values_are_infinite_in_few_rows(name: str) -> None:
    """What rounding leaves of a weight may be zero, and zero times infinity is no number."""
    spec, kv_len = layer(name), 64
    narrow = spec.kv_dtype != spec.dtype
    q = torch.zeros(1, 6, spec.head_dim, dtype=getattr(torch, spec.dtype))
    kv = torch.ones(2, 4, 16, 2, spec.head_dim)
    kv[1, 0, 3, :, 5] = math.inf if not narrow else math.nan  # e4m3 has no infinity
    attn = BatchAttention(spec, max_requests=1, max_tokens=1, max_kv_len=kv_len)
    lens = torch.tensor([kv_len], dtype=torch.int32)
    pages = torch.arange(4, dtype=torch.int32)[None]
    table = PageTable.from_block_table(pages, lens, page_size=16)
    attn.plan(torch.tensor([0, 1], dtype=torch.int32), table)
    out = attn.run(q, *kv.to(getattr(torch, spec.kv_dtype)))[0]
    expected = torch.ones_like(out)
    expected[:, 5] = math.nan if narrow else math.inf
    torch.testing.assert_close(out, expected, equal_nan=True)


@pytest.fixture(scope="module")
def machine() -> Any:
    source = str(emulator_modules.FOLDER / "machine_cases.cc")
    return jit.load(jit.ModuleSpec("emulator_cases", (source,), generated=emulator_modules.headers()))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing_thread", "wait for something that never comes"),
        ("other_instruction", "lanes of a warp meet in"),
        ("outside", "shared memory: address"),
        ("uninitialised", "mbarrier: not initialised"),
        ("unreadable", "global memory: a read outside of it"),
        ("unfenced", "bulk copy: a lane has written without a fence"),
        ("unfenced_product", "wgmma: a lane has waited at an mbarrier without a fence"),
        ("uncommitted", "bulk copy: waited for, but not committed"),
        ("left_behind", "bulk copy: its thread has ended"),
    ],
)
def test_the_emulated_gpu_refuses(machine: Any, case: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        getattr(machine, case)(1)


def test_a_bulk_copy_by_the_rules(machine: Any) -> None:
    for seed in range(20):
        machine.bulk_copy(seed)


def test_a_barrier_tells_all_whether_one_said_so(machine: Any) -> None:
    assert all(machine.vote(seed) for seed in range(20))


@pytest.mark.parametrize("case", ["barrier", "copy", "product"])
def test_what_is_not_waited_for_is_seen_too_early(machine: Any, case: str) -> None:
    assert all(getattr(machine, f"{case}_with_wait")(seed) for seed in range(20))
    assert not all(getattr(machine, f"{case}_without_wait")(seed) for seed in range(20))
