# SPDX-License-Identifier: Apache-2.0
"""What BatchAttention asks of its arguments: errors that name the argument, before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from fi_backend.core.layout_checks import expect_layout
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError


def expect_tensor(name: str, value: object) -> None:
    """Check that `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch tensor; got {type(value).__name__}.")


def expect_caches(spec: AttentionSpec, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check what the kernel cannot see: tensors that agree with each other and not with the spec."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        expect_tensor(name, tensor)
    expect_layout(spec, q, k_cache, v_cache)


def take_workspace(workspace: Tensor | None, size: int, device: torch.device) -> Tensor:
    """Return `workspace`, or a new one of `size` bytes where none is given."""
    if workspace is None:
        return torch.empty(size, dtype=torch.uint8, device=device)
    if workspace.dtype is not torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        got = f"{workspace.dtype} {tuple(workspace.shape)}"
        raise TypeError(f"workspace: expected a contiguous uint8 vector; got {got}.")
    if workspace.device != device:
        raise ValueError(f"workspace: expected device {device}; got {workspace.device}.")
    if workspace.numel() < size:
        raise ValueError(
            f"workspace: expected workspace_size() = {size} bytes or more; got {workspace.numel()}."
        )
    if workspace.data_ptr() % 64:
        raise ValueError("workspace: expected a 64-byte aligned start; allocate it as a tensor of its own.")
    return workspace


def expect_table(spec: AttentionSpec, device: torch.device, qo_indptr: Tensor, table: PageTable) -> None:
    """Check that the query starts and the page table are of one batch, of the spec and on the device."""
    expect_tensor("qo_indptr", qo_indptr)
    if not isinstance(table, PageTable):
        got = type(table).__name__
        raise TypeError(f"page_table: expected a PageTable or a BlockSparse; got {got}.")
    if not isinstance(table.kv_lens, Tensor):
        raise TypeError(
            f"page_table: expected torch tensors; got {type(table.kv_lens).__name__}. Arrays of other "
            "libraries belong to fi_backend.arrays.BatchAttention."
        )
    if qo_indptr.dtype is not torch.int32:
        raise TypeError(f"qo_indptr: expected int32; got {qo_indptr.dtype}.")
    if qo_indptr.dim() != 1 or qo_indptr.shape[0] != table.num_requests + 1:
        raise PlanError(
            f"qo_indptr: expected {table.num_requests + 1} entries, one more than the page table "
            f"has requests; got shape {tuple(qo_indptr.shape)}."
        )
    expected = 1 if table.indices is None else spec.page_size
    if table.page_size != expected:
        raise PlanError(f"page_table: expected page_size {expected}, the spec's; got {table.page_size}.")
    for name, tensor in (("qo_indptr", qo_indptr), ("page_table", table.kv_lens)):
        if tensor.device != device:
            raise PlanError(f"{name}: expected device {device}; got {tensor.device}.")
