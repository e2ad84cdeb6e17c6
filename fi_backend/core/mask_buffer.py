# SPDX-License-Identifier: Apache-2.0
"""Custom masks packed on their device, at addresses that a captured graph may hold."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core.attention_checks import expect_tensor
from fi_backend.core.custom_mask import PackedMask
from fi_backend.core.ops_module import native_ops


class MaskBuffer:
    """Packed masks at addresses that never move: a captured graph reads what was packed last.

    max_requests: of one step. max_q_len, max_kv_len: of one request; every request gets the bytes of such a
    mask. device: the CPU or a CUDA device, where all tensors below lie. num_heads: 1 where all heads see the
    same keys, else num_kv_heads or num_qo_heads of the layer.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_q_len: int,
        max_kv_len: int,
        device: torch.device | str,
        num_heads: int = 1,
    ) -> None:
        for name, value in (
            ("max_requests", max_requests),
            ("max_q_len", max_q_len),
            ("max_kv_len", max_kv_len),
            ("num_heads", num_heads),
        ):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more; got {value}.")
        self.max_requests = max_requests
        self.num_heads = num_heads
        self._stride = -(-max_q_len * num_heads * max_kv_len // 8)
        self._bits = torch.zeros(max_requests * self._stride, dtype=torch.uint8, device=device)
        self._begin = torch.arange(max_requests, dtype=torch.int64, device=device) * self._stride
        self._kv_len = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._pack = native_ops("device", self._bits.device).pack_mask

    def pack(
        self, mask: Tensor | None, qo_indptr: Tensor, kv_lens: Tensor, *, tree: bool = False
    ) -> PackedMask:
        """Pack the masks of one step over those of the last one; for BatchAttention.plan(custom_mask=...).

        mask: bool, one vector: the matrices of all requests one after another, row by row, each
            [q_len, num_heads, kv_len], or [q_len, num_heads, q_len] with tree=True, where every key before
            the request's queries is visible. What lies past its end is visible; None: everything is.
        qo_indptr: int32 [requests + 1]; kv_lens: int32 [requests]; the lengths that run() will read.

        On CUDA the call is queued on the current stream, never waits for the device and may be captured.
        For a request whose mask does not fit (more bits than max_q_len and max_kv_len make) attention answers
        NaN on CUDA, and refuses the step on a CPU. Raises ValueError or TypeError naming the argument.
        """
        for name, tensor in (("qo_indptr", qo_indptr), ("kv_lens", kv_lens)):
            expect_tensor(name, tensor)
        if kv_lens.dim() != 1 or tuple(qo_indptr.shape) != (kv_lens.shape[0] + 1,):
            raise ValueError(
                "qo_indptr, kv_lens: expected [requests + 1] and [requests]; got "
                f"{tuple(qo_indptr.shape)} and {tuple(kv_lens.shape)}."
            )
        requests = kv_lens.shape[0]
        if requests > self.max_requests:
            raise ValueError(f"kv_lens: expected at most {self.max_requests} requests; got {requests}.")
        q_lens = qo_indptr.diff().long()
        sizes = q_lens * self.num_heads * (q_lens if tree else kv_lens)
        heads = self.num_heads
        bits = self._bits[: requests * self._stride]
        kv_len = self._kv_len[:requests]
        self._pack(mask, sizes.cumsum(0) - sizes, qo_indptr, kv_lens, tree, heads, bits, kv_len)
        return PackedMask(bits, self._begin[:requests], kv_len, heads)
