# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries through the same kernels: the oracle's values, and the bits of torch's path."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from array_cases import LIBRARIES, Case, arguments, attention_of, converter, to_tensor
from attention_batch import SPLIT_COSTS, Batch, EngineState, logit_size, torch_threads
from engine_memory import Layout
from numeric import assert_bitwise_equal, assert_close, assert_lse_close

from fi_backend.arrays import (
    AttentionSpec,
    AttentionVariant,
    PageTable,
    PrefixForest,
    SharingLimits,
    TensorParam,
)
from fi_backend.variants import CHANNEL_SCALES, rope

ml_dtypes = pytest.importorskip("ml_dtypes")

BATCHES = {
    "float32, block table": Batch(
        spec=AttentionSpec(6, 2, 64, head_dim_v=48, dtype="float32", page_size=16),
        q_lens=(1, 5, 33, 0),
        kv_lens=(70, 5, 100, 9),
        layout=Layout(k="hnd", v="strided", q="qkv", out="heads", first_token=2, extra_tokens=3),
        costs=SPLIT_COSTS,
    ),
    "float16, csr": Batch(
        spec=AttentionSpec(4, 4, 80, dtype="float16", page_size=7, alibi=True, sinks=True),
        q_lens=(3, 1),
        kv_lens=(40, 129),
        layout=Layout(table="csr"),
    ),
    "bfloat16, token table": Batch(
        spec=AttentionSpec(8, 1, 128, dtype="bfloat16", window_left=30, logits_soft_cap=20.0, page_size=4),
        q_lens=(2, 17, 1),
        kv_lens=(90, 17, 33),
        layout=Layout(table="token", k="packed", v="packed"),
    ),
    "custom masks": Batch(
        spec=AttentionSpec(4, 2, 64, dtype="float32", page_size=16, custom_mask=True),
        q_lens=(3, 1, 20),
        kv_lens=(40, 9, 70),
    ),
    "shared prefix": Batch(
        spec=AttentionSpec(4, 2, 64, dtype="float32", page_size=16),
        q_lens=(1, 1, 2, 1),
        kv_lens=(200, 190, 180, 20),
        shares=((0, 0), (0, 10), (0, 10), (0, 0)),
        sharing=SharingLimits(max_nodes=2, max_levels=2, max_tokens=8),
        costs=SPLIT_COSTS,
    ),
    "fp8, contiguous": Batch(
        spec=AttentionSpec(4, 2, 64, dtype="bfloat16", kv_dtype="float8_e4m3fn", causal=False),
        q_lens=(4, 1),
        kv_lens=(65, 200),
        layout=Layout(table="ragged"),
        k_scale=(0.5, 2.0),
        v_scale=0.25,
    ),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_values_and_bits(batch: Batch, library: str) -> None:
    convert = converter(library)
    with torch_threads(1):
        state = EngineState(batch)
        expected, expected_lse, amplitude = state.expected()
        same, same_lse = state.run(state.attention())
        attention = attention_of(state, convert)
        q, k, v = (convert(t) for t in (state.queries(), state.k_cache, state.v_cache))
        out, lse = attention.run(q, k, v, return_lse=True, **arguments(state, convert))
        assert type(out) is type(lse) is type(q)
        assert out.dtype == q.dtype
        rows, sums = state.inside(to_tensor(out)), state.inside(to_tensor(lse))
    assert_close("out", rows, expected, amplitude=amplitude, slack=logit_size(batch))
    assert_lse_close("lse", sums, expected_lse, slack=logit_size(batch))
    assert_bitwise_equal("out", rows, state.inside(same))
    assert_bitwise_equal("lse", sums, state.inside(same_lse))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_that_are_given_are_written_where_they_are(library: str) -> None:
    batch = BATCHES["float32, block table"]
    convert = converter(library)
    state = EngineState(batch)
    same, same_lse = state.run(state.attention())
    attention = attention_of(state, convert)
    out, lse = state.outputs()  # strided, behind poison
    q, k, v = (convert(t) for t in (state.queries(), state.k_cache, state.v_cache))
    given = convert(out)
    assert attention.run(q, k, v, out=given, lse=convert(lse)) is given
    assert_bitwise_equal("out", out, same)
    assert_bitwise_equal("lse", lse, same_lse)
    assert all(gap.isnan().all() for gap in state.gaps), "memory between the heads was written"


def test_raw_bits_stand_for_dtypes_that_a_library_lacks() -> None:
    case = Case(ml_dtypes.bfloat16, ml_dtypes.float8_e5m2)
    attention = case.plan()
    out = attention.run(case.q, case.k, case.v)
    case.check(out)
    raw = attention.run(case.q.view(np.uint16), case.k.view(np.uint8), case.v.view(np.uint8))
    assert raw.dtype == np.uint16
    np.testing.assert_array_equal(raw, out.view(np.uint16))
    with pytest.raises(TypeError, match=r"^k_cache: expected float8_e5m2; got float8_e4m3fn\. .* astype"):
        attention.run(case.q, case.k.view(ml_dtypes.float8_e4m3fn), case.v)
    with pytest.raises(TypeError, match=r"^q: expected bfloat16; got uint32"):
        attention.run(case.q.astype(np.uint32), case.k, case.v)


def test_inputs_may_be_read_only_and_results_may_not() -> None:
    case = Case(ml_dtypes.bfloat16)
    attention = case.plan()
    expected = attention.run(case.q, case.k, case.v)
    inputs = [array.copy() for array in (case.q, case.k, case.v)]
    for array in (*inputs, case.pages, case.kv_lens, case.starts):
        array.flags.writeable = False
    out = np.zeros_like(expected)
    case.plan().run(*inputs, out=out)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out: expected an array that can be written; got a read-only one"):
        attention.run(*inputs, out=out)
    lse = np.broadcast_to(np.float32(0), (5, 4))
    with pytest.raises(ValueError, match=r"^lse: expected an array that can be written"):
        attention.run(*inputs, lse=lse)


def test_lengths_and_tables_are_read_when_run_is_called() -> None:
    case = Case()
    attention = case.plan()
    before = attention.run(case.q, case.k, case.v)
    case.kv_lens[1], case.pages[0, 0] = 9, 2
    case.check(attention.run(case.q, case.k, case.v))
    assert not np.allclose(before, attention.run(case.q, case.k, case.v))


@pytest.mark.parametrize("library", ["numpy", "jax"])
def test_a_plan_keeps_its_arrays_alive_and_the_next_one_lets_them_go(library: str) -> None:
    case = Case()
    expected = case.plan().run(case.q, case.k, case.v)
    convert = converter(library)
    index = [convert(torch.from_numpy(each.copy())) for each in (case.starts, case.pages, case.kv_lens)]
    case.attention.plan(index[0], PageTable.from_block_table(index[1], index[2], page_size=16))
    watched = [weakref.ref(array) for array in index]
    del index
    gc.collect()
    rubbish = [np.full(64, -7, np.int32) for _ in range(200)]  # takes memory that was freed too early
    np.testing.assert_array_equal(case.attention.run(case.q, case.k, case.v), expected)
    assert len(rubbish) == 200
    case.plan()
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


def test_a_call_lets_its_arrays_go() -> None:
    case = Case(ml_dtypes.bfloat16)
    attention = case.plan()
    q, out = case.q.copy(), np.empty_like(case.q)
    attention.run(q, case.k, case.v, out=out)
    watched = [weakref.ref(q), weakref.ref(out)]
    del q, out
    gc.collect()
    assert [reference() for reference in watched] == [None, None]


def test_results_of_jax_are_its_own() -> None:
    """Each call has memory of its own: an array that JAX holds never changes."""
    jnp = pytest.importorskip("jax.numpy")
    case = Case()
    attention = case.plan()
    q, k, v = map(jnp.asarray, (case.q, case.k, case.v))
    first = attention.run(q, k, v)
    kept = np.array(first)
    second = attention.run(2 * q, k, v)
    gc.collect()
    np.testing.assert_array_equal(first, kept)
    assert not np.array_equal(second, kept)
    assert float(jnp.sum(first + 1)) == pytest.approx(float(kept.sum()) + kept.size, rel=1e-5)


def test_a_forest_that_is_given_and_one_that_is_found_are_one_plan() -> None:
    case = Case(sharing=SharingLimits(max_nodes=1, max_levels=1, max_tokens=5), costs=SPLIT_COSTS)
    case.pages[1], case.kv_lens[:] = case.pages[0], (40, 45)
    table = PageTable.from_block_table(case.pages, case.kv_lens, page_size=16)
    limits = np.array([32, 32], np.int32)
    found = case.attention.plan(case.starts, table, detect_prefixes=True, shareable=limits).tobytes()
    out = case.attention.run(case.q, case.k, case.v)
    case.check(out)
    forest = PrefixForest.from_block_table(case.pages, limits, 16)
    assert isinstance(forest.nodes, np.ndarray)
    assert forest.nodes.tolist() == [[-1, 0, 32, 0, 2]]
    given = case.attention.plan(case.starts, table, forest=forest)
    assert given.num_nodes == 1
    assert given.tobytes() == found
    np.testing.assert_array_equal(case.attention.run(case.q, case.k, case.v), out)


def test_masks_of_heads_as_one_vector() -> None:
    case = Case(custom_mask=True)
    random = np.random.default_rng(3)
    masks = [random.random((q, 4, kv)) < 0.6 for q, kv in ((1, 40), (4, 17))]
    attention = case.plan(np.concatenate([mask.reshape(-1) for mask in masks]))
    out = attention.run(case.q, case.k, case.v)
    apart = case.plan(masks).run(case.q, case.k, case.v)
    np.testing.assert_array_equal(out, apart)
    rows = []
    for head in range(4):
        of_head = case.plan([mask[:, head] for mask in masks]).run(case.q, case.k, case.v)
        rows.append(of_head[:, head])
    np.testing.assert_allclose(out, np.stack(rows, axis=1), rtol=1e-5, atol=1e-6)
    assert not np.allclose(out, Case().plan().run(case.q, case.k, case.v))


@pytest.mark.parametrize("library", LIBRARIES)
def test_variants(library: str) -> None:
    convert = converter(library)
    case = Case(variant="alibi")
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    q, k, v = (convert(torch.from_numpy(each)) for each in (case.q, case.k, case.v))
    attention = case.plan()
    out = attention.run(q, k, v, variant_args={"slopes": convert(slopes)})
    case.check(out, slopes=slopes)
    with pytest.raises(ValueError, match=r"^variant_args: expected slopes, which variant alibi declares"):
        attention.run(q, k, v)
    with pytest.raises(TypeError, match=r"^slopes: expected an array with __dlpack__ .*; got list"):
        attention.run(q, k, v, variant_args={"slopes": [0.5] * 4})
    with pytest.raises(ValueError, match=r"^slopes: expected .*\[4\]; got \[3\]"):
        attention.run(q, k, v, variant_args={"slopes": convert(slopes[:3])})
    if library != "jax":
        with pytest.raises(ValueError, match=r"^slopes: expected a contiguous array\. Copy it"):
            attention.run(q, k, v, variant_args={"slopes": convert(slopes.repeat_interleave(2)[::2])})


def test_defaults_of_a_variant_are_arrays_of_any_library() -> None:
    factors = np.array([1.0, 2.0, 0.5, 1.0], np.float32)
    variant = AttentionVariant(
        name="weighed",
        params={"factors": TensorParam("float32", ("num_qo_heads",)), "offset": "float32"},
        defaults={"factors": factors, "offset": 1.0},
        output_transform="return o * params.factors[qo_head_idx] + params.offset;",
    )
    case = Case(variant=variant)
    attention = case.plan()
    expected = case.expected()[0] * torch.from_numpy(factors).double().view(1, 4, 1) + 1.0
    np.testing.assert_allclose(attention.run(case.q, case.k, case.v), expected, rtol=1e-5, atol=1e-5)
    doubled = {"factors": 2 * factors, "offset": np.float32(0)}
    twice = attention.run(case.q, case.k, case.v, variant_args=doubled)
    np.testing.assert_allclose(twice, 2 * (expected - 1.0), rtol=1e-5, atol=1e-5)


def check_bits_of_torch(variant: AttentionVariant | str, **args: np.ndarray) -> None:
    """Bits of the path with torch, which are not those without the variant."""
    from fi_backend import BatchAttention as TorchAttention
    from fi_backend import PageTable as TorchTable

    case = Case(variant=variant)
    out = case.plan().run(case.q, case.k, case.v, variant_args=args)
    with_torch = TorchAttention(case.spec, max_requests=2, max_tokens=8, max_kv_len=64, variant=variant)
    starts, pages, lens = map(torch.from_numpy, (case.starts, case.pages, case.kv_lens))
    with_torch.plan(starts, TorchTable.from_block_table(pages, lens, page_size=16))
    same = with_torch.run(
        *map(torch.from_numpy, (case.q, case.k, case.v)),
        variant_args={name: torch.from_numpy(array) for name, array in args.items()},
    )
    assert_bitwise_equal("out", to_tensor(out), same)
    assert not np.allclose(out, Case().plan().run(case.q, case.k, case.v))


def test_rope_has_its_frequencies_without_torch() -> None:
    """The same bits as with torch, whose path copies the default to its device."""
    check_bits_of_torch(rope(32))


def test_transformed_values() -> None:
    random = np.random.default_rng(0)
    scales = {name: random.random((2, 64), np.float32) for name in CHANNEL_SCALES.params}
    check_bits_of_torch("channel_scales", **scales)


def test_a_step_without_requests() -> None:
    """NumPy gives arrays without elements strides of 0."""
    attention = Case().attention
    table = PageTable.from_block_table(np.zeros((0, 3), np.int32), np.zeros(0, np.int32), page_size=16)
    attention.plan(np.array([0], np.int32), table)
    cache = np.zeros((0, 16, 2, 64), np.float32)
    assert attention.run(np.zeros((0, 4, 64), np.float32), cache, cache).shape == (0, 4, 64)
