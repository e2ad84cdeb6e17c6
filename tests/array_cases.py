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
from numeric import assert_close
from oracle import attention as oracle
from torch import Tensor

from fi_backend.arrays import AttentionSpec, BatchAttention, PageTable

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


def to_tensor(array: Any, raw: torch.dtype | None = None) -> Tensor:
    """A copy as a tensor on the host. raw: what unsigned integers are the bits of."""
    if isinstance(array, Tensor):
        return array.cpu().clone()
    plain = np.array(array.get() if hasattr(array, "get") else array)
    if raw is not None and plain.dtype.kind == "u":
        return torch.from_numpy(plain.view(str(_LACKING[raw]).removeprefix("torch."))).view(raw)
    for dtype, bits in _LACKING.items():
        if f"torch.{plain.dtype.name}" == str(dtype):
            return torch.from_numpy(plain.view(str(bits).removeprefix("torch."))).view(dtype)
    return torch.from_numpy(plain)


def to_cupy(tensor: Tensor) -> Any:
    """The same memory of a GPU as a CuPy array; raw bits where CuPy lacks the dtype."""
    cupy = importlib.import_module("cupy")
    bits = _LACKING.get(tensor.dtype)
    if bits is None:
        return cupy.from_dlpack(tensor)
    return cupy.from_dlpack(tensor.view(bits)).view("u" + str(bits).removeprefix("torch."))


LIBRARIES: dict[str, Callable[[Tensor], Any]] = {"numpy": to_numpy, "jax": to_jax, "torch": lambda t: t}
GPU_LIBRARIES: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda t: t,
    "cupy": to_cupy,
    "jax": lambda t: to_jax_device(t),
}


def to_jax_device(tensor: Tensor) -> Any:
    """A copy as a JAX array on the GPU where JAX has one, else skips."""
    jax = importlib.import_module("jax")
    try:
        [device, *_] = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")
    return jax.device_put(to_numpy(tensor.cpu().contiguous()), device)


def converter(library: str, device: str = "cpu") -> Callable[[Tensor], Any]:
    """What makes arrays of a library of tensors on a device; skips where it is not installed."""
    pytest.importorskip(library)
    return (LIBRARIES if device == "cpu" else GPU_LIBRARIES)[library]


def host_converter(state: EngineState, convert: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """What makes index arrays: those of a GPU's batch are NumPy's, in host memory."""
    return convert if state.batch.device == "cpu" else lambda tensor: to_numpy(tensor.cpu())


def table_of(state: EngineState, convert: Callable[[Tensor], Any]) -> PageTable:
    """The batch's page table, of other arrays."""
    table, kind = state.table, state.batch.layout.table
    host = host_converter(state, convert)
    lens, size = host(table.kv_lens), table.page_size
    bounds = torch.cat([table.row_begin, table.row_end[-1:]])
    if kind == "ragged":
        return PageTable.ragged(host(bounds))
    assert table.indices is not None
    indices = convert(table.indices)
    if kind == "csr":
        return PageTable.from_csr(host(bounds), indices, page_size=size, kv_lens=lens)
    if kind == "token":
        rows = table.row_begin // table.indices.stride(0)
        return PageTable.from_token_table(indices, host(rows), lens, page_size=size)
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
        sharing=batch.sharing,
    )
    starts = torch.tensor([batch.layout.first_token, *batch.q_lens]).cumsum(0).to(torch.int32)
    host = host_converter(state, convert)
    masks = None if state.masks is None else [host(mask) for mask in state.masks]
    shares = batch.sharing is not None
    plan = attention.plan(host(starts), table_of(state, convert), custom_mask=masks, detect_prefixes=shares)
    assert (plan.num_nodes > 0) is shares
    return attention


def arguments(state: EngineState, convert: Callable[[Tensor], Any]) -> dict[str, Any]:
    """What run() takes beside queries and caches."""

    def scale(value: float | tuple[float, ...]) -> Any:
        return convert(torch.tensor(value, device=device)) if isinstance(value, tuple) else value

    device = state.batch.device
    return {
        "k_scale": scale(state.batch.k_scale),
        "v_scale": scale(state.batch.v_scale),
        "alibi_slopes": None if state.slopes is None else convert(state.slopes.to(device)),
        "sinks": None if state.sinks is None else convert(state.sinks.to(device)),
    }


class Case:
    """Two requests of NumPy arrays, the second with several queries."""

    def __init__(
        self, dtype: Any = np.float32, kv_dtype: Any = None, custom_mask: bool = False, **options: Any
    ) -> None:
        random = np.random.default_rng(7)
        kv_dtype = kv_dtype or dtype
        names = {"dtype": np.dtype(dtype).name, "kv_dtype": np.dtype(kv_dtype).name}
        self.spec = AttentionSpec(4, 2, 64, page_size=16, custom_mask=custom_mask, **names)
        self.q = random.standard_normal((5, 4, 64)).astype(dtype)
        self.k, self.v = (random.standard_normal((6, 16, 2, 64)).astype(kv_dtype) for _ in "kv")
        self.starts = np.array([0, 1, 5], np.int32)
        self.kv_lens = np.array([40, 17], np.int32)
        self.pages = np.array([[3, 0, 5], [1, 4, -1]], np.int32)
        self.attention = BatchAttention(self.spec, max_requests=2, max_tokens=8, max_kv_len=64, **options)

    def plan(self, custom_mask: Any = None) -> BatchAttention:
        table = PageTable.from_block_table(self.pages, self.kv_lens, page_size=16)
        self.attention.plan(self.starts, table, custom_mask=custom_mask)
        return self.attention

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's output and its amplitude, sum(p * |v|)."""
        rows = []
        for r, (a, b) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            k, v = (
                to_tensor(cache[self.pages[r]].reshape(-1, 2, 64)[: self.kv_lens[r]])
                for cache in (self.k, self.v)
            )
            both = torch.cat([v.float(), v.float().abs()], dim=2)
            rows.append(oracle(to_tensor(self.q[a:b]), k.float(), both, **options)[0])
        output, amplitude = torch.cat(rows).split(64, dim=2)
        return output, amplitude

    def check(self, out: Any, **options: Any) -> None:
        expected, amplitude = self.expected(**options)
        assert_close("out", to_tensor(out), expected, amplitude=amplitude)
