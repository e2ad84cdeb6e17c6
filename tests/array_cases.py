# SPDX-License-Identifier: Apache-2.0
"""Batches of attention_batch.py as arrays of other libraries, and their results as tensors again."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attention_batch import EngineState
from torch import Tensor

from fi_backend.arrays import BatchAttention, PageTable

_LACKING = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8}


def to_numpy(tensor: Tensor) -> Any:
    """The same memory as a NumPy array, with its strides."""
    if tensor.dtype not in _LACKING:
        return tensor.numpy()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
    return tensor.view(_LACKING[tensor.dtype]).numpy().view(dtype)


def to_jax(tensor: Tensor) -> Any:
    """A copy as a JAX array; int64 becomes int32, as JAX has it."""
    return importlib.import_module("jax.numpy").asarray(to_numpy(tensor))


def to_tensor(array: Any) -> Tensor:
    """A copy as a tensor."""
    if isinstance(array, Tensor):
        return array.clone()
    plain = np.array(array)
    for dtype, bits in _LACKING.items():
        if f"torch.{plain.dtype.name}" == str(dtype):
            return torch.from_numpy(plain.view(str(bits).removeprefix("torch."))).view(dtype)
    return torch.from_numpy(plain)


LIBRARIES: dict[str, Callable[[Tensor], Any]] = {"numpy": to_numpy, "jax": to_jax, "torch": lambda t: t}


def converter(library: str) -> Callable[[Tensor], Any]:
    """What makes arrays of a library of tensors on the CPU; skips where it is not installed."""
    pytest.importorskip(library)
    return LIBRARIES[library]


def table_of(state: EngineState, convert: Callable[[Tensor], Any]) -> PageTable:
    """The batch's page table, of other arrays."""
    table, kind = state.table, state.batch.layout.table
    lens, size = convert(table.kv_lens), table.page_size
    bounds = torch.cat([table.row_begin, table.row_end[-1:]])
    if kind == "ragged":
        return PageTable.ragged(convert(bounds))
    assert table.indices is not None
    indices = convert(table.indices)
    if kind == "csr":
        return PageTable.from_csr(convert(bounds), indices, page_size=size, kv_lens=lens)
    if kind == "token":
        rows = table.row_begin // table.indices.stride(0)
        return PageTable.from_token_table(indices, convert(rows), lens, page_size=size)
    return PageTable.from_block_table(indices, lens, page_size=size)


def attention_of(state: EngineState, convert: Callable[[Tensor], Any]) -> BatchAttention:
    """A planned BatchAttention."""
    batch = state.batch
    attention = BatchAttention(
        batch.spec,
        max_requests=len(batch.q_lens),
        max_tokens=max(1, sum(batch.q_lens)),
        max_kv_len=max(1, *batch.kv_lens),
        num_ctas=batch.num_ctas,
        costs=batch.costs,
        device=batch.device,
    )
    starts = torch.tensor([batch.layout.first_token, *batch.q_lens]).cumsum(0).to(torch.int32)
    attention.plan(convert(starts), table_of(state, convert))
    return attention


def arguments(state: EngineState, convert: Callable[[Tensor], Any]) -> dict[str, Any]:
    """What run() takes beside queries and caches."""

    def scale(value: float | tuple[float, ...]) -> Any:
        return convert(torch.tensor(value)) if isinstance(value, tuple) else value

    return {
        "k_scale": scale(state.batch.k_scale),
        "v_scale": scale(state.batch.v_scale),
        "alibi_slopes": None if state.slopes is None else convert(state.slopes),
        "sinks": None if state.sinks is None else convert(state.sinks),
    }
