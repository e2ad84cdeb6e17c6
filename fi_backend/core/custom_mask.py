# SPDX-License-Identifier: Apache-2.0
"""Custom masks: one boolean matrix a request, packed to bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """Bits, little end first; request r starts at byte begin[r] and its rows are kv_len[r] bits long.

    bits: uint8 [bytes]; begin: int64 [requests]; kv_len: int32 [requests].
    """

    bits: Tensor
    begin: Tensor
    kv_len: Tensor


def pack_mask(
    mask: Tensor | Sequence[Tensor],
    q_lens: Tensor,
    kv_lens: Tensor,
    device: torch.device | str = "cpu",
) -> PackedMask:
    """Pack a custom mask.

    mask: bool; either one [q_len, kv_len] matrix a request, or all of them flattened row by row into one
        vector of sum(q_len * kv_len) elements. True keeps the key.
    q_lens, kv_lens: host int32 [requests], exact and not negative. device: where the packed mask goes;
    copying a mask from there to the host waits for it. Raises TypeError or ValueError naming the
    request whose mask does not fit.
    """
    if q_lens.shape != kv_lens.shape:
        raise ValueError(f"kv_lens: expected {q_lens.numel()} entries, one a request; got {kv_lens.numel()}.")
    for name, lens in (("qo_indptr", q_lens), ("kv_lens", kv_lens)):
        if bool((lens < 0).any()):
            raise ValueError(f"{name}: expected lengths >= 0; got {lens.tolist()}.")
    sizes = (q_lens.long() * kv_lens.long()).tolist()
    if isinstance(mask, Tensor):
        if mask.dtype is not torch.bool:
            raise TypeError(f"custom_mask: expected bool; got {mask.dtype}.")
        if mask.numel() != sum(sizes):
            raise ValueError(
                f"custom_mask: expected {sum(sizes)} elements, the sum of q_len * kv_len over "
                f"{len(sizes)} requests; got {mask.numel()}."
            )
        pieces = list(mask.reshape(-1).split(sizes)) if sizes else []
    else:
        pieces = list(mask)
        if len(pieces) != len(sizes):
            raise ValueError(
                f"custom_mask: expected {len(sizes)} matrices, one a request; got {len(pieces)}."
            )
        shapes = zip(q_lens.tolist(), kv_lens.tolist(), strict=True)
        for row, (piece, shape) in enumerate(zip(pieces, shapes, strict=True)):
            if not isinstance(piece, Tensor):
                raise TypeError(f"custom_mask[{row}]: expected bool {shape}; got {type(piece).__name__}.")
            if piece.dtype is not torch.bool or tuple(piece.shape) != shape:
                got = f"{piece.dtype} {tuple(piece.shape)}"
                raise ValueError(f"custom_mask[{row}]: expected bool {shape}; got {got}.")
    packed = [np.packbits(piece.cpu().numpy().reshape(-1), bitorder="little") for piece in pieces]
    begin = np.zeros(len(packed), dtype=np.int64)
    begin[1:] = np.cumsum([p.size for p in packed[:-1]])
    bits = np.concatenate(packed) if packed else np.zeros(0, dtype=np.uint8)
    parts = (torch.from_numpy(bits), torch.from_numpy(begin), kv_lens.clone())
    return PackedMask(*(part.to(device) for part in parts))


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
    if mask is None or isinstance(mask, PackedMask):
        return mask
    if qo_indptr is None or kv_lens is None:
        raise PlanError("qo_indptr_host, kv_lens_host: expected both with a custom mask; got None.")
    return pack_mask(mask, qo_indptr.diff(), kv_lens, device)
