# SPDX-License-Identifier: Apache-2.0
"""Arrays that do not fit are refused by name, with what was expected; nothing is written then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fi_backend
from fi_backend import arrays
from fi_backend.arrays import AttentionSpec, BatchAttention, PageTable, SharingLimits
from fi_backend.errors import PlanError, UnsupportedError

SPEC = AttentionSpec(4, 2, 64, dtype="float32", page_size=16)
STARTS, LENS = np.array([0, 1, 5], np.int32), np.array([40, 17], np.int32)
PAGES = np.array([[3, 0, 5], [1, 4, -1]], np.int32)
Q, CACHE = np.ones((5, 4, 64), np.float32), np.ones((6, 16, 2, 64), np.float32)


def attention(**options: Any) -> BatchAttention:
    return BatchAttention(SPEC, max_requests=2, max_tokens=8, max_kv_len=64, **options)


def table(pages: Any = PAGES, lens: Any = LENS) -> PageTable:
    return PageTable.from_block_table(pages, lens, page_size=16)


def masked(custom_mask: Any) -> None:
    """Plan 1 query over 40 keys and 4 over 17 under a mask."""
    spec = AttentionSpec(4, 2, 64, dtype="float32", page_size=16, custom_mask=True)
    planned = BatchAttention(spec, max_requests=2, max_tokens=8, max_kv_len=64)
    planned.plan(STARTS, table(), custom_mask=custom_mask)


def misaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    memory[:] = array.reshape(-1).view(np.uint8)
    return memory.view(array.dtype).reshape(array.shape)


class Elsewhere:
    """An array of a device that has no kernels here."""

    shape, dtype = Q.shape, "float32"

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("asked for memory that nobody can read")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (10, 0)  # ROCm


class Nameless(Elsewhere):
    """An array of the host whose library nobody knows."""

    def __dlpack__(self, **keywords: Any) -> object:
        if keywords:
            raise TypeError("a producer of the protocol's first version")
        return Q.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


GOOD: dict[str, Any] = {"q": Q, "k_cache": CACHE, "v_cache": CACHE}
RUN: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"q": Q.tolist()}, TypeError, r"^q: expected an array with __dlpack__ .*; got list"),
    "none": ({"k_cache": None}, TypeError, r"^k_cache: expected an array .*; got NoneType"),
    "masked": ({"q": np.ma.array(Q)}, TypeError, r"^q: expected a plain array; got a masked one"),
    "device": ({"q": Elsewhere()}, ValueError, r"^q: expected an array in host memory .*device type 10"),
    "dtype": ({"q": Q.astype(np.float16)}, TypeError, r"^q: expected float32; got float16\. .* astype\(\)"),
    "float64": ({"v_cache": CACHE.astype(float)}, TypeError, r"^v_cache: expected float32; got float64"),
    "objects": ({"q": Q.astype(object)}, ValueError, r"^q: expected an array that DLPack can describe"),
    "byte order": ({"q": Q.astype(">f4")}, ValueError, r"^q: .*only supports native byte order"),
    "alignment": ({"k_cache": misaligned(CACHE)}, ValueError, r"^k_cache: .*do not start at multiples"),
    "backwards": ({"q": Q[::-1]}, ValueError, r"^q: expected strides >= 0; got \(-256, 64, 1\)"),
    "columns": (
        {"v_cache": np.ones((6, 16, 2, 128), np.float32)[..., ::2]},
        ValueError,
        r"^v_cache: expected unit stride in the last dimension; got 2\. Copy it",
    ),
    # tvm-ffi has no name for it; an error inside of an error ended the process.
    "complex": ({"q": Q.astype(np.complex64)}, TypeError, r"^q: expected float32; got complex64"),
    "no dimensions": ({"k_cache": np.ones((), np.float32)}, ValueError, r"^k_cache: expected \[pages, "),
    "heads": ({"q": Q[:, :2]}, ValueError, r"^q: expected \[tokens, 4, 64\], as the spec says"),
    "cache heads": ({"k_cache": CACHE[:, :, :1]}, ValueError, r"^k_cache: expected 2 KV heads"),
    "pages": ({"v_cache": CACHE[:5]}, ValueError, r"^v_cache: expected 6 pages, as k_cache; got 5"),
    "page size": ({"k_cache": CACHE[:, :8]}, ValueError, r"^k_cache: expected shape \[any, 16, 2, 64\]"),
    "few tokens": ({"q": Q[:4]}, ValueError, r"^qo_indptr\[2\]: expected at most the 4 tokens"),
    "out dtype": ({"out": np.ones(Q.shape)}, TypeError, r"^out: expected float32; got float64"),
    "out shape": ({"out": np.ones((4, 4, 64), np.float32)}, ValueError, r"^out: expected shape \[5, 4, 64\]"),
    "lse shape": ({"lse": np.ones((4, 5), np.float32)}, ValueError, r"^lse: expected shape \[5, 4\]"),
    "out list": ({"out": [0.0]}, TypeError, r"^out: expected an array with __dlpack__ .*; got list"),
    "scale": ({"k_scale": "1"}, TypeError, r"^k_scale: expected an array .*; got str"),
    "scales": ({"k_scale": np.ones(3, np.float32)}, ValueError, r"^k_scale: expected shape \[1\]; got \[3\]"),
    "slopes": ({"alibi_slopes": np.ones(4, np.float32)}, ValueError, r"^alibi_slopes: expected None"),
    "variant": ({"variant_args": {"x": 1}}, ValueError, r"^variant_args: expected None without a variant"),
    "stream": ({"stream": 1}, ValueError, r"^stream: expected None on a CPU"),
    "gradient": (
        {"q": torch.ones(5, 4, 64, requires_grad=True)},
        ValueError,
        r"^q: expected an array that DLPack can describe; got one of torch that it cannot: .*gradient",
    ),
    "namespace": ({"q": Nameless()}, TypeError, r"^out: expected an array, since Nameless has no __array"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "message"), RUN.values(), ids=RUN)
def test_run(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    planned = attention()
    planned.plan(STARTS, table())
    out, lse = np.full_like(Q, 7), np.full((5, 4), 7, np.float32)
    with pytest.raises(kind, match=message):
        planned.run(**{**({} if "q" in changed else {"out": out, "lse": lse}), **GOOD, **changed})
    assert (out == 7).all()
    assert (lse == 7).all()
    assert (planned.run(**GOOD) == 1).all()


PLAN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "starts list": (lambda: attention().plan([0, 1, 5], table()), TypeError, r"^qo_indptr: .*got list"),  # type: ignore[arg-type]
    "starts dtype": (
        lambda: attention().plan(STARTS.astype(np.int64), table()),
        TypeError,
        r'^qo_indptr: expected dtype int32; got int64\. Convert it with \.astype\("int32"\)',
    ),
    "starts": (lambda: attention().plan(STARTS[:2], table()), PlanError, r"^qo_indptr: expected 3 entries"),
    "strided starts": (
        lambda: attention().plan(np.repeat(STARTS, 2)[::2], table()),
        PlanError,
        r"^qo_indptr: expected unit stride .*got 2\. Copy it",
    ),
    "torch's table": (
        lambda: attention().plan(
            STARTS,
            fi_backend.PageTable.from_block_table(
                torch.from_numpy(PAGES), torch.from_numpy(LENS), page_size=16
            ),  # type: ignore[arg-type]
        ),
        TypeError,
        r"^page_table: expected a PageTable of fi_backend\.arrays; got fi_backend\.core\.page_table\.Pag",
    ),
    "page size": (
        lambda: attention().plan(STARTS, PageTable.from_block_table(PAGES, LENS, page_size=8)),
        PlanError,
        r"^page_table: expected page_size 16, the spec's; got 8",
    ),
    "lengths": (
        lambda: attention().plan(STARTS, table(lens=LENS + 40)),
        PlanError,
        r"^kv_lens.*expected .*64",
    ),
    "pages dtype": (lambda: table(PAGES.astype(np.int64)), TypeError, r"^block_table: expected dtype int32"),
    "pages columns": (lambda: table(PAGES[:, ::2]), ValueError, r"^block_table: expected unit stride"),
    "pages backwards": (lambda: table(PAGES[::-1]), ValueError, r"^block_table: expected a stride of 0 or"),
    "pages list": (lambda: table(PAGES.tolist()), TypeError, r"^block_table: expected an array .*got list"),
    "lens count": (lambda: table(lens=LENS[:1]), ValueError, r"^kv_lens: expected 2 entries, one a row"),
    "rows dtype": (
        lambda: PageTable.from_token_table(PAGES, np.array([0.0, 1.0]), LENS, page_size=1),
        TypeError,
        r"^rows: expected dtype int32 or int64; got float64",
    ),
    "csr": (
        lambda: PageTable.from_csr(np.array([0, 3, 2]), PAGES[0], page_size=16, kv_lens=LENS),
        ValueError,
        r"^indptr: expected a non-decreasing sequence; got \[0, 3, 2\]",
    ),
    "csr length": (
        lambda: PageTable.from_csr(np.array([0, 2]), PAGES[0], page_size=16, kv_lens=LENS[:1]),
        ValueError,
        r"^kv_lens\[0\]: expected at most 32 .*got 40",
    ),
    "last page": (
        lambda: PageTable.from_csr(np.array([0, 2]), PAGES[0], page_size=16, last_page_len=LENS[1:]),
        ValueError,
        r"^last_page_len\[0\]: expected 1\.\.16 .*got 17",
    ),
    "ragged": (lambda: PageTable.ragged(np.array([0, 4, 2])), ValueError, r"^kv_indptr: expected a non-decr"),
    "a mask without need": (
        lambda: attention().plan(STARTS, table(), custom_mask=np.ones(108, bool)),
        PlanError,
        r"^custom_mask: expected None, as spec\.custom_mask says",
    ),
    "no mask": (lambda: masked(None), PlanError, r"^custom_mask: expected a mask, as spec\.custom_mask says"),
    "mask of no array": (lambda: masked(5), TypeError, r"^custom_mask: expected bool arrays.*got int"),
    "mask size": (
        lambda: masked(np.ones(107, bool)),
        ValueError,
        r"^custom_mask: expected 108 elements, the sum of q_len \* kv_len over 2 .*got 107",
    ),
    "mask dtype": (
        lambda: masked(np.ones(108, np.uint8)),
        TypeError,
        r"^custom_mask: expected bool; got uint8",
    ),
    "mask list": (
        lambda: masked([np.ones((1, 40), bool), [True]]),
        TypeError,
        r"^custom_mask\[1\]: expected an array with __dlpack__ .*got list",
    ),
    "mask shape": (
        lambda: masked([np.ones((1, 40), bool), np.ones((4, 16), bool)]),
        ValueError,
        r"^custom_mask\[1\]: expected bool \(4, 17\); got bool \(4, 16\)",
    ),
    "device": (lambda: attention(device="tpu"), UnsupportedError, r"^device: .*got 'tpu'"),
    "length limit": (
        lambda: BatchAttention(SPEC, max_requests=1, max_tokens=1, max_kv_len=2**31 - 1),
        ValueError,
        r"^max_kv_len: expected at most",
    ),
    "no room": (
        lambda: attention().plan(STARTS, table(), detect_prefixes=True),
        PlanError,
        r"^detect_prefixes: expected a BatchAttention with sharing",
    ),
    "shareable alone": (
        lambda: attention().plan(STARTS, table(), shareable=LENS),
        PlanError,
        r"^shareable: expected detect_prefixes=True with it",
    ),
    "shareable": (
        lambda: attention(sharing=SharingLimits(1, 1, 2)).plan(
            STARTS, table(), detect_prefixes=True, shareable=LENS[:1]
        ),
        PlanError,
        r"^shareable: expected 2 entries, one a request",
    ),
    "forest": (lambda: attention().plan(STARTS, table(), forest=[]), TypeError, r"^forest: expected a "),
    "no plan": (lambda: attention().run(**GOOD), PlanError, r"^run\(\): expected plan\(\)"),
    "merge": (
        lambda: arrays.merge_state(Q, CACHE, Q, CACHE),
        ValueError,
        r"^lse(_a)?: expected shape \[5, 4\]",
    ),
    "states": (lambda: arrays.merge_states(Q, Q), ValueError, r"^o: expected \[n, parts, heads, head_dim\]"),
    "append": (
        lambda: arrays.append_kv(Q, Q, CACHE, CACHE, np.array([0.0])),
        TypeError,
        r"^slot_mapping: expected dtype int64 or int32; got float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "kind", "message"), PLAN.values(), ids=PLAN)
def test_what_is_refused_before_a_run(build: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build()


def test_a_plan_that_fails_leaves_the_last_one() -> None:
    planned = attention()
    planned.plan(STARTS, table())
    values = np.arange(CACHE.size, dtype=np.float32).reshape(CACHE.shape)
    before = planned.run(Q, CACHE, values)
    with pytest.raises(PlanError):
        planned.plan(np.array([0, 8, 90], np.int32), table())
    np.testing.assert_array_equal(planned.run(Q, CACHE, values), before)


def test_tracers_of_jax_are_refused() -> None:
    jax = pytest.importorskip("jax")
    planned = attention()
    planned.plan(STARTS, table())
    with pytest.raises(
        TypeError, match=r"^q: expected an array with values; got a tracer of JAX\. Call it out"
    ):
        jax.jit(lambda q: planned.run(q, CACHE, CACHE))(Q)
    with pytest.raises(ValueError, match=r"^out: expected an array that can be written; got one of JAX"):
        planned.run(Q, CACHE, CACHE, out=jax.numpy.zeros(Q.shape))


def test_torch_does_not_take_tables_of_numpy() -> None:
    with_torch = fi_backend.BatchAttention(SPEC, max_requests=2, max_tokens=8, max_kv_len=64)
    with pytest.raises(
        TypeError, match=r"^page_table: expected torch tensors; got ndarray\. .*fi_backend\.arrays"
    ):
        with_torch.plan(torch.from_numpy(STARTS), table())
    with pytest.raises(
        TypeError, match=r"^kv_lens: expected a torch tensor, as block_table is; got an array of"
    ):
        fi_backend.PageTable.from_block_table(torch.from_numpy(PAGES), LENS, page_size=16)  # type: ignore[arg-type]
