# SPDX-License-Identifier: Apache-2.0
"""Custom masks: one boolean matrix a request, packed to bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fi_backend.core.index_arrays import dtype_name, is_torch, size_of
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


class HostBits(NamedTuple):
    """A packed mask in host memory; the fields are those of PackedMask."""

    bits: npt.NDArray[np.uint8]
    begin: npt.NDArray[np.int64]
    num_heads: int


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
        into one vector of sum(q_len * heads * kv_len) elements, or as one array where they are equally large.
        True keeps the key.
    q_lens, kv_lens: host int32 [requests], exact and not negative. device: where the packed mask goes;
    copying a mask from there to the host waits for it. num_heads: the numbers of heads that a mask may have,
    all requests of a step the same one. Raises TypeError or ValueError naming the request whose mask does
    not fit.
    """
    import torch

    packed = pack_bits(mask, q_lens, kv_lens, num_heads)
    return PackedMask(
        torch.from_numpy(packed.bits).to(device),
        torch.from_numpy(packed.begin).to(device),
        kv_lens.clone().to(device),
        packed.num_heads,
    )


def pack_bits(mask: Any, q_lens: Any, kv_lens: Any, num_heads: Collection[int]) -> HostBits:
    """Pack a custom mask of torch tensors or of NumPy arrays; arguments and errors as for pack_mask()."""
    if q_lens.shape != kv_lens.shape:
        raise ValueError(
            f"kv_lens: expected {size_of(q_lens)} entries, one a request; got {size_of(kv_lens)}."
        )
    for name, lens in (("qo_indptr", q_lens), ("kv_lens", kv_lens)):
        if bool((lens < 0).any()):
            raise ValueError(f"{name}: expected lengths >= 0; got {lens.tolist()}.")
    shapes = list(zip(q_lens.tolist(), kv_lens.tolist(), strict=True))
    if _is_array(mask) and mask.ndim == 1:
        pieces, heads = _split(mask, shapes, num_heads)
    else:
        pieces = _pieces(mask, shapes)
        heads = _expect_pieces(pieces, shapes, num_heads)
    packed = [np.packbits(_on_host(piece).reshape(-1), bitorder="little") for piece in pieces]
    begin = np.zeros(len(packed), dtype=np.int64)
    begin[1:] = np.cumsum([p.size for p in packed[:-1]])
    bits = np.concatenate(packed) if packed else np.zeros(0, dtype=np.uint8)
    return HostBits(bits, begin, heads)


def _is_array(value: object) -> bool:
    return is_torch(value) or isinstance(value, np.ndarray)


def _pieces(mask: Any, shapes: list[tuple[int, int]]) -> list[Any]:
    """Return the matrices of the requests; one array may hold that of one request, or those of equal ones."""
    if _is_array(mask):
        several = mask.ndim == 3 and mask.shape[0] == len(shapes) and tuple(mask.shape[1:]) in shapes
        return list(mask) if several or mask.ndim == 4 else [mask]
    if not isinstance(mask, Sequence) or isinstance(mask, str):
        raise TypeError(
            f"custom_mask: expected bool arrays, one a request, or one vector; got {type(mask).__name__}."
        )
    return list(mask)


def _on_host(array: Any) -> npt.NDArray[np.bool_]:
    plain: npt.NDArray[np.bool_] = array.cpu().numpy() if is_torch(array) else array
    return plain


def _split(mask: Any, shapes: list[tuple[int, int]], num_heads: Collection[int]) -> tuple[list[Any], int]:
    """Cut the vector of all requests."""
    if dtype_name(mask.dtype) != "bool":
        raise TypeError(f"custom_mask: expected bool; got {mask.dtype}.")
    sizes = [q * kv for q, kv in shapes]
    found = [heads for heads in sorted(num_heads) if sum(sizes) * heads == size_of(mask)]
    if not found:
        several = "".join(f", or {heads} times as many for as many heads" for heads in sorted(num_heads)[1:])
        raise ValueError(
            f"custom_mask: expected {sum(sizes)} elements, the sum of q_len * kv_len over {len(sizes)} "
            f"requests{several}; got {size_of(mask)}."
        )
    flat, bounds = mask.reshape(-1), accumulate((size * found[0] for size in sizes), initial=0)
    return [flat[begin:end] for begin, end in pairwise(bounds)], found[0]


def _expect_pieces(pieces: list[Any], shapes: list[tuple[int, int]], num_heads: Collection[int]) -> int:
    """Check the matrices of the requests and return their number of heads."""
    if len(pieces) != len(shapes):
        raise ValueError(f"custom_mask: expected {len(shapes)} matrices, one a request; got {len(pieces)}.")
    heads = 0
    for row, (piece, (q_len, kv_len)) in enumerate(zip(pieces, shapes, strict=True)):
        if not _is_array(piece):
            got = type(piece).__name__
            raise TypeError(f"custom_mask[{row}]: expected bool {(q_len, kv_len)}; got {got}.")
        of_heads = piece.shape[1] if piece.ndim == 3 else 1
        heads = heads or of_heads
        expected = (q_len, kv_len) if piece.ndim == 2 else (q_len, heads, kv_len)
        if dtype_name(piece.dtype) != "bool" or tuple(piece.shape) != expected or of_heads != heads:
            shape = (q_len, kv_len) if heads == 1 else (q_len, heads, kv_len)
            got = f"{piece.dtype} {tuple(piece.shape)}"
            raise ValueError(f"custom_mask[{row}]: expected bool {shape}; got {got}.")
    if pieces and heads not in num_heads:
        known = " or ".join(map(str, sorted(num_heads)))
        raise ValueError(f"custom_mask: expected {known} heads, as the spec says; got {heads}.")
    return heads or 1


def pack_for(
    spec: AttentionSpec,
    mask: Any,
    qo_indptr: Any,
    kv_lens: Any,
    device: Any,
    pack: Callable[..., PackedMask] = pack_mask,
) -> PackedMask | None:
    """Return the packed mask of a step of `spec`, or None where the spec has none.

    mask: as pack_mask() takes it, or packed. qo_indptr, kv_lens: host int32, exact. pack: in place of
    pack_mask(), for other arrays. Raises PlanError when one is missing, or a mask is given without need.
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
    return pack(mask, qo_indptr[1:] - qo_indptr[:-1], kv_lens, device, num_heads=heads)
