# SPDX-License-Identifier: Apache-2.0
"""Masks packed at fixed addresses give the bits of pack_mask, and attention of the same numbers."""

from __future__ import annotations

import pytest
import torch
from numeric import assert_close
from oracle import attention

from fi_backend import AttentionSpec, BatchAttention, PageTable
from fi_backend.core.custom_mask import pack_mask
from fi_backend.core.mask_buffer import MaskBuffer

Q_LENS = (3, 1, 0, 8, 5)
KV_LENS = (11, 1, 7, 64, 5)


def lengths() -> tuple[torch.Tensor, torch.Tensor]:
    qo_indptr = torch.zeros(len(Q_LENS) + 1, dtype=torch.int32)
    qo_indptr[1:] = torch.tensor(Q_LENS).cumsum(0)
    return qo_indptr, torch.tensor(KV_LENS, dtype=torch.int32)


def buffer() -> MaskBuffer:
    made = MaskBuffer(max_requests=7, max_q_len=8, max_kv_len=64, device="cpu")
    made._bits.fill_(0xAA)
    return made


def masks(*, tree: bool) -> list[torch.Tensor]:
    """One matrix a request; a query sees its own key, and with `tree` all keys before the queries."""
    random = torch.Generator().manual_seed(3)
    found = []
    for q, kv in zip(Q_LENS, KV_LENS, strict=True):
        mask = torch.rand(q, kv, generator=random) < 0.5
        if tree:
            mask[:, : kv - q] = True
        mask.diagonal(kv - q).fill_(True)
        found.append(mask)
    return found


def flat(matrices: list[torch.Tensor], *, tree: bool) -> torch.Tensor:
    parts = [m[:, m.shape[1] - m.shape[0] :] if tree else m for m in matrices]
    return torch.cat([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("tree", [False, True])
def test_bits_are_those_of_pack_mask(tree: bool) -> None:
    qo_indptr, kv_lens = lengths()
    matrices = masks(tree=tree)
    packed = buffer().pack(flat(matrices, tree=tree), qo_indptr, kv_lens, tree=tree)
    expected = pack_mask(matrices, qo_indptr.diff(), kv_lens)
    ends = [*expected.begin.tolist()[1:], expected.bits.numel()]
    for request, (begin, end) in enumerate(zip(expected.begin.tolist(), ends, strict=True)):
        at = int(packed.begin[request])
        assert torch.equal(packed.bits[at : at + end - begin], expected.bits[begin:end]), request
    assert torch.equal(packed.kv_len, kv_lens)


@pytest.mark.parametrize("tree", [False, True])
def test_attention_against_the_oracle(tree: bool) -> None:
    spec = AttentionSpec(4, 2, 32, dtype="float32", page_size=16, custom_mask=True)
    runner = BatchAttention(spec, max_requests=8, max_tokens=32, max_kv_len=64)
    qo_indptr, kv_lens = lengths()
    random = torch.Generator().manual_seed(5)
    k_cache, v_cache = torch.randn(2, 21, 16, 2, 32, generator=random)
    pages = torch.randperm(20, generator=random).int().reshape(5, 4) + 1
    k_cache[0], v_cache[0] = torch.nan, torch.nan
    q = torch.randn(sum(Q_LENS), 4, 32, generator=random)
    matrices, held = masks(tree=tree), buffer()
    packed = held.pack(flat(matrices, tree=tree), qo_indptr, kv_lens, tree=tree)
    runner.plan(qo_indptr, PageTable.from_block_table(pages, kv_lens, page_size=16), custom_mask=packed)
    out = runner.run(q, k_cache, v_cache)
    for request, mask in enumerate(matrices):
        rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        keys, values = (
            cache[pages[request].long()].flatten(0, 1)[: KV_LENS[request]] for cache in (k_cache, v_cache)
        )
        expected, _ = attention(q[rows], keys, values, mask=mask)
        amplitude, _ = attention(q[rows], keys, values.abs(), mask=mask)
        assert_close(f"request {request}", out[rows], expected, amplitude=amplitude)


def test_addresses_stay_and_old_bits_do_not() -> None:
    qo_indptr, kv_lens = lengths()
    held = buffer()
    first = held.pack(torch.zeros(800, dtype=torch.bool), qo_indptr, kv_lens)
    again = held.pack(None, qo_indptr, kv_lens)
    assert first.bits.data_ptr() == again.bits.data_ptr()
    assert first.kv_len.data_ptr() == again.kv_len.data_ptr()
    everything = pack_mask(
        [torch.ones(q, kv, dtype=torch.bool) for q, kv in zip(Q_LENS, KV_LENS, strict=True)],
        qo_indptr.diff(),
        kv_lens,
    )
    at = int(again.begin[3])
    assert torch.equal(again.bits[at : at + 64], everything.bits[-68:-4])


def test_past_the_end_of_the_mask_everything_is_visible() -> None:
    packed = buffer().pack(
        torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2], dtype=torch.int32), torch.tensor([3]).int()
    )
    assert packed.bits[0] == 0b111100


def test_a_mask_that_does_not_fit_is_marked() -> None:
    held = MaskBuffer(max_requests=2, max_q_len=2, max_kv_len=8, device="cpu")
    packed = held.pack(None, torch.tensor([0, 2, 4]).int(), torch.tensor([9, 8]).int())
    assert packed.kv_len.tolist() == [-1, 8]


def test_wrong_arguments() -> None:
    qo_indptr, kv_lens = lengths()
    with pytest.raises(ValueError, match="kv_lens: expected at most 2 requests; got 5"):
        MaskBuffer(max_requests=2, max_q_len=1, max_kv_len=1, device="cpu").pack(None, qo_indptr, kv_lens)
    with pytest.raises(TypeError, match="qo_indptr: expected a torch tensor; got list"):
        buffer().pack(None, [0, 1], kv_lens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^qo_indptr, kv_lens: expected .*got \(5,\) and \(5,\)"):
        buffer().pack(None, qo_indptr[1:], kv_lens)
    with pytest.raises(TypeError, match="mask: expected bool"):
        buffer().pack(torch.zeros(800, dtype=torch.int32), qo_indptr, kv_lens)
    with pytest.raises(ValueError, match="max_q_len: expected 1 or more; got 0"):
        MaskBuffer(max_requests=2, max_q_len=0, max_kv_len=1, device="cpu")
