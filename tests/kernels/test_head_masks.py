# SPDX-License-Identifier: Apache-2.0
"""Custom masks of each query head or KV head, alone and under causal, window and a user's variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from head_masks import HKV, HQ, KV_LENS, Q_LENS, QO_INDPTR, HeadMaskStep, int32

from fi_backend.core.custom_mask import PackedMask, pack_mask
from fi_backend.core.mask_buffer import MaskBuffer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, HKV, HQ])
def test_a_mask_for_each_head(heads: int, dtype: str) -> None:
    step = HeadMaskStep(heads, dtype=dtype)
    step.check(step.masks)


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_left": 40}])
def test_causal_and_window_stay_in_force(options: dict[str, Any]) -> None:
    step = HeadMaskStep(HQ, **options)
    step.check(step.masks)


def test_with_a_variant() -> None:
    step = HeadMaskStep(HQ)
    step.check(step.masks, variant="output_scale")


def test_one_vector_holds_the_masks_of_all_requests() -> None:
    step = HeadMaskStep(HKV)
    step.check(torch.cat([mask.reshape(-1) for mask in step.masks]))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("heads", [HKV, HQ])
def test_a_mask_buffer(heads: int, tree: bool) -> None:
    step = HeadMaskStep(heads, tree=tree)
    held = MaskBuffer(max_requests=6, max_q_len=25, max_kv_len=130, device="cpu", num_heads=heads)
    parts = [m[..., m.shape[2] - m.shape[0] :] if tree else m for m in step.masks]
    flat = torch.cat([part.reshape(-1) for part in parts])
    packed = held.pack(flat, QO_INDPTR, int32(KV_LENS), tree=tree)
    expected = pack_mask(step.masks, int32(Q_LENS), int32(KV_LENS), num_heads=[heads])
    ends = [*expected.begin.tolist()[1:], expected.bits.numel()]
    for r, (begin, end) in enumerate(zip(expected.begin.tolist(), ends, strict=True)):
        at = int(packed.begin[r])
        assert torch.equal(packed.bits[at : at + end - begin], expected.bits[begin:end]), r
    step.check(packed)


def test_shared_prefixes_are_read_by_each_request() -> None:
    """A mask tells the rows apart, so that a step with a forest is planned as without one."""
    step = HeadMaskStep(HQ)
    plain = step.check(step.masks)
    again = step.check(step.masks, detect_prefixes=True)
    assert plain.planner.sharing is None
    assert again.planner.sharing is None


def ones(heads: int) -> list[torch.Tensor]:
    return [torch.ones(q, heads, kv).bool() for q, kv in zip(Q_LENS, KV_LENS, strict=True)]


def packed(heads: int) -> PackedMask:
    parts = (torch.zeros(len(Q_LENS), dtype=kind) for kind in (torch.uint8, torch.int64, torch.int32))
    return PackedMask(*parts, num_heads=heads)


UNKNOWN = "^custom_mask: expected 1 or 2 or 6 heads, as the spec says; got "
WRONG = {
    "heads": (ones(3), UNKNOWN + "3"),
    "no heads": (ones(0), UNKNOWN + "0"),
    "packed": (packed(3), UNKNOWN + "3"),
    "mixed": (
        [ones(HQ)[0][:, 0], *ones(HQ)[1:]],
        r"^custom_mask\[1\]: expected bool \(1, 130\); got .*6, 130",
    ),
    "shape": (
        [ones(HQ)[0], *ones(HQ)[:-1]],
        r"^custom_mask\[1\]: expected bool \(1, 6, 130\); got .*3, 6, 70",
    ),
    "elements": (
        torch.ones(7).bool(),
        "^custom_mask: expected 1945 elements.*, or 2 times as many for .*got 7",
    ),
}


@pytest.mark.parametrize(("mask", "message"), WRONG.values(), ids=WRONG)
def test_masks_that_do_not_fit_are_refused(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadMaskStep(HQ).check(mask)


def test_one_array_of_one_request_or_of_equal_ones() -> None:
    """An array of the heads first has as many elements as one of the tokens first, and another meaning."""
    mask = torch.rand(3, 2, 9) < 0.5
    one, heads = (int32([3]), int32([9])), (2,)
    expected = pack_mask([mask], *one, num_heads=heads)
    assert torch.equal(pack_mask(mask, *one, num_heads=heads).bits, expected.bits)
    for turned in (mask.transpose(0, 1), mask.permute(2, 0, 1), mask.flatten(0, 1)):
        with pytest.raises(ValueError, match=r"^custom_mask\[0\]: expected bool \(3, "):
            pack_mask(turned, *one, num_heads=heads)
    two = int32([3, 3]), int32([9, 9])
    both = torch.stack((mask, ~mask))
    expected = pack_mask([mask, ~mask], *two, num_heads=heads)
    assert torch.equal(pack_mask(both, *two, num_heads=heads).bits, expected.bits)
    expected = pack_mask([mask[:, 0], mask[:, 1]], *two)
    assert torch.equal(pack_mask(mask.transpose(0, 1), *two).bits, expected.bits)
    with pytest.raises(ValueError, match=r"^custom_mask: expected 2 matrices, one a request; got 1"):
        pack_mask(mask, *two, num_heads=heads)
    with pytest.raises(TypeError, match=r"^custom_mask: expected bool arrays.*got int"):
        pack_mask(5, *two)  # type: ignore[arg-type]


def test_bits_that_begin_at_the_end_of_memory_are_refused() -> None:
    """In 64 bits their end would come before their begin, and inside of the mask."""
    step = HeadMaskStep(1)
    bits = pack_mask(step.masks, int32(Q_LENS), int32(KV_LENS))
    begin = bits.begin.clone()
    begin[1] = 2**63 - 1
    with pytest.raises(ValueError, match=r"^mask: expected request 1 within the .* from byte 92233720"):
        step.check(PackedMask(bits.bits, begin, bits.kv_len))


def test_bits_that_end_before_the_heads_do_are_refused() -> None:
    """Bits of one head, said to be those of six: the rows of the last request would lie behind the end."""
    step = HeadMaskStep(1)
    bits = pack_mask(step.masks, int32(Q_LENS), int32(KV_LENS))
    with pytest.raises(ValueError, match=r"^mask: expected request \d within the .* bytes of the mask"):
        step.check(PackedMask(bits.bits, bits.begin, bits.kv_len, HQ))
