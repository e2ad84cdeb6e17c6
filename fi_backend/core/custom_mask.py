# SPDX-License-Identifier: Apache-2.0
"""Custom masks: one boolean matrix a request, packed to bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """Bits, little end first: request r starts at byte begin[r], and every row is kv_len[r] bits long.

    A request has a row for each query token and head, the heads of a token one after another.
    bits: uint8 [bytes]; begin: int64 [requests]; kv_len: int32 [requests]. num_heads: 1 where all heads see
    the same keys, else num_kv_heads or num_qo_heads of the layer.
    """

    bits: Tensor
    begin: Tensor
    kv_len: Tensor
    num_heads: int = 1


def pack_mask(
    mask: Tensor | Sequence[Tensor],
    q_lens: Tensor,
    kv_lens: Tensor,
    device: torch.device | str = "cpu",
    *,
    num_heads: Collection[int] = (1,),
) -> PackedMask:
    """Pack a custom mask.

    mask: bool; one [q_len, kv_len] or [q_len, heads, kv_len] a request, or all of them flattened row by row
        into one vector of sum(q_len * heads * kv_len) elements. True keeps the key.
    q_lens, kv_lens: host int32 [requests], exact and not negative. device: where the packed mask goes;
    copying a mask from there to the host waits for it. num_heads: the numbers of heads that a mask may have,
    all requests of a step the same one. Raises TypeError or ValueError naming the request whose mask does
    not fit.
    """
    if q_lens.shape != kv_lens.shape:
        raise ValueError(f"kv_lens: expected {q_lens.numel()} entries, one a request; got {kv_lens.numel()}.")
    for name, lens in (("qo_indptr", q_lens), ("kv_lens", kv_lens)):
        if bool((lens < 0).any()):
            raise ValueError(f"{name}: expected lengths >= 0; got {lens.tolist()}.")
    shapes = list(zip(q_lens.tolist(), kv_lens.tolist(), strict=True))
    if isinstance(mask, Tensor):
        pieces, heads = _split(mask, shapes, num_heads)
    else:
        pieces = list(mask)
        heads = _expect_pieces(pieces, shapes, num_heads)
    packed = [np.packbits(piece.cpu().numpy().reshape(-1), bitorder="little") for piece in pieces]
    begin = np.zeros(len(packed), dtype=np.int64)
    begin[1:] = np.cumsum([p.size for p in packed[:-1]])
    bits = np.concatenate(packed) if packed else np.zeros(0, dtype=np.uint8)
    return PackedMask(
        torch.from_numpy(bits).to(device),
        torch.from_numpy(begin).to(device),
        kv_lens.clone().to(device),
        heads,
    )


def _split(
    mask: Tensor, shapes: list[tuple[int, int]], num_heads: Collection[int]
) -> tuple[list[Tensor], int]:
    """Cut the vector of all requests."""
    if mask.dtype is not torch.bool:
        raise TypeError(f"custom_mask: expected bool; got {mask.dtype}.")
    sizes = [q * kv for q, kv in shapes]
    found = [heads for heads in sorted(num_heads) if sum(sizes) * heads == mask.numel()]
    if not found:
        several = "".join(f", or {heads} times as many for as many heads" for heads in sorted(num_heads)[1:])
        raise ValueError(
            f"custom_mask: expected {sum(sizes)} elements, the sum of q_len * kv_len over {len(sizes)} "
            f"requests{several}; got {mask.numel()}."
        )
    cut = mask.reshape(-1).split([size * found[0] for size in sizes]) if sizes else ()
    return list(cut), found[0]


def _expect_pieces(pieces: list[Tensor], shapes: list[tuple[int, int]], num_heads: Collection[int]) -> int:
    """Check the matrices of the requests and return their number of heads."""
    if len(pieces) != len(shapes):
        raise ValueError(f"custom_mask: expected {len(shapes)} matrices, one a request; got {len(pieces)}.")
    heads = 0
    for row, (piece, (q_len, kv_len)) in enumerate(zip(pieces, shapes, strict=True)):
        if not isinstance(piece, Tensor):
            got = type(piece).__name__
            raise TypeError(f"custom_mask[{row}]: expected bool {(q_len, kv_len)}; got {got}.")
        of_heads = piece.shape[1] if piece.dim() == 3 else 1
        heads = heads or of_heads
        expected = (q_len, kv_len) if piece.dim() == 2 else (q_len, heads, kv_len)
        if piece.dtype is not torch.bool or tuple(piece.shape) != expected or of_heads != heads:
            shape = (q_len, kv_len) if heads == 1 else (q_len, heads, kv_len)
            got = f"{piece.dtype} {tuple(piece.shape)}"
            raise ValueError(f"custom_mask[{row}]: expected bool {shape}; got {got}.")
    if pieces and heads not in num_heads:
        known = " or ".join(map(str, sorted(num_heads)))
        raise ValueError(f"custom_mask: expected {known} heads, as the spec says; got {heads}.")
    return heads or 1


def pack_for(
    spec: AttentionSpec,
    mask: Tensor | Sequence[Tensor] | PackedMask | None,
    qo_indptr: Tensor | None,
    kv_lens: Tensor | None,
    device: torch.device,
) -> PackedMask | None:
    """Return the packed mask of a step of `spec`, or None where the spec has none.

    mask: as pack_mask() takes it, or packed. qo_indptr, kv_lens: host int32, exact. Raises PlanError when one
    is missing, or a mask is given without need.
    """
    if (mask is not None) != spec.custom_mask:
        expected = "a mask" if spec.custom_mask else "None"
        raise PlanError(f"custom_mask: expected {expected}, as spec.custom_mask says; got the opposite.")
    heads = {1, spec.num_kv_heads, spec.num_qo_heads}
    if isinstance(mask, PackedMask) and mask.num_heads not in heads:
        known = " or ".join(map(str, sorted(heads)))
        raise PlanError(f"custom_mask: expected {known} heads, as the spec says; got {mask.num_heads}.")
    if mask is None or isinstance(mask, PackedMask):
        return mask
    if qo_indptr is None or kv_lens is None:
        raise PlanError("qo_indptr_host, kv_lens_host: expected both with a custom mask; got None.")
    return pack_mask(mask, qo_indptr.diff(), kv_lens, device, num_heads=heads)
