# SPDX-License-Identifier: Apache-2.0
"""Requests over SGLang's own layers and pools, without an engine, compared with the oracle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from numeric import assert_close
from oracle import attention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_cpu import Shape, make_runner

from fi_backend.adapters.sglang.backend import FiAttnBackend

# (forward mode, query tokens of each request): chunks, decoding beside chunks, decoding, requests that end.
STEPS = (
    (ForwardMode.EXTEND, (5, 70, 1)),
    (ForwardMode.EXTEND, (0, 60, 0)),
    (ForwardMode.MIXED, (1, 90, 1)),
    (ForwardMode.DECODE, (1, 1, 1)),
    (ForwardMode.DECODE, (1, 0, 1)),
)
ROWS = (3, 1, 4)


class Engine:
    """Requests that grow step by step, with slots given out at random, page by page."""

    def __init__(
        self, shape: Shape, *, sinks: bool = False, scale: float | None = None, **server: Any
    ) -> None:
        self.shape = shape
        self.random = torch.Generator().manual_seed(7)
        self.runner = make_runner(shape, **server)
        self.layers = list(self.runner.model)
        for layer in self.layers:
            layer.k_scale_float = scale
            layer.v_scale_float = None if scale is None else 2 * scale
        pages = torch.randperm(shape.slots // shape.page_size, generator=self.random) + 1
        self.free = pages.tolist()
        pool = self.runner.token_to_kv_pool
        if shape.hybrid:
            # Another page of the windows' pool for each page; slot 0 stays where it is.
            moved = torch.cat([torch.zeros(1, dtype=torch.int64), pages])
            slots = torch.arange(shape.slots + shape.page_size)
            mapping = moved[slots // shape.page_size] * shape.page_size + slots % shape.page_size
            pool.register_mapping(torch.cat([mapping, torch.tensor([-1])]))
        for part in (pool.full_kv_pool, pool.swa_kv_pool) if shape.hybrid else (pool,):
            for buffer in (*part.k_buffer, *part.v_buffer):
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0x7F)
        self.sinks = torch.randn(shape.heads, generator=self.random) + 1 if sinks else None
        self.lengths = [0] * len(ROWS)
        self.stored: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.backend = FiAttnBackend(self.runner)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random).to(self.runner.dtype)

    def step(self, mode: ForwardMode, lengths: tuple[int, ...]) -> SimpleNamespace:
        """Give the new tokens their slots and return the forward batch of the requests that have any."""
        table, size, slots = self.runner.req_to_token_pool.req_to_token, self.shape.page_size, []
        for request, new in enumerate(lengths):
            for position in range(self.lengths[request], self.lengths[request] + new):
                if position % size == 0:
                    table[ROWS[request], position] = self.free.pop() * size
                else:
                    table[ROWS[request], position] = table[ROWS[request], position - 1] + 1
                slots.append(int(table[ROWS[request], position]))
            self.lengths[request] += new
        self.active = [request for request, new in enumerate(lengths) if new]
        self.new = [lengths[request] for request in self.active]
        seq_lens = torch.tensor([self.lengths[request] for request in self.active])
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(self.active),
            req_pool_indices=torch.tensor([ROWS[request] for request in self.active]),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens.clone(),
            out_cache_loc=torch.tensor(slots),
            extend_seq_lens=torch.tensor(self.new, dtype=torch.int32),
            extend_seq_lens_cpu=list(self.new),
            spec_info=None,
        )

    def share(self, request: int, other: int, tokens: int) -> None:
        """Let an empty request begin with the first tokens of another one, whole pages."""
        table = self.runner.req_to_token_pool.req_to_token
        table[ROWS[request], :tokens] = table[ROWS[other], :tokens]
        self.lengths[request] = tokens
        for layer in self.layers:
            keys, values = self.stored[layer.layer_id, other]
            self.stored[layer.layer_id, request] = keys[:tokens], values[:tokens]

    def check_layer(
        self, layer: Any, batch: SimpleNamespace, *, save: bool = True, masks: Any = None
    ) -> None:
        """Run one layer, through the engine's own dispatch, and compare it with the oracle.

        masks: of the queries of each request among themselves.
        """
        shape, tokens = self.shape, sum(self.new)
        q = self.normal(tokens, shape.heads * shape.head_dim)
        k = self.normal(tokens, shape.kv_heads, shape.head_dim)
        v = self.normal(tokens, shape.kv_heads, shape.head_dim_v)
        given = (k.clone(), v.clone()) if save else (None, None)
        out = self.backend.forward(q, *given, layer, batch, save_kv_cache=save, **self.options)
        assert out.shape == (tokens, shape.heads * shape.head_dim_v)
        self.compare(layer, q, k if save else None, v if save else None, out, masks=masks)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.sinks is None else {"sinks": self.sinks.bfloat16()}

    def compare(self, layer: Any, q: Any, k: Any, v: Any, out: Any, *, masks: Any = None) -> None:
        """Compare the rows of the active requests, which come first, with the oracle."""
        shape, start = self.shape, 0
        for index, (request, new) in enumerate(zip(self.active, self.new, strict=True)):
            part = slice(start, start + new)
            start += new
            if k is not None:
                self.remember(layer, request, k[part], v[part])
            keys, values = self.stored[layer.layer_id, request]
            rule = {
                "scale": layer.scaling,
                "window_left": layer.sliding_window_size,
                "soft_cap": shape.cap,
                "sinks": None if self.sinks is None else self.sinks.bfloat16(),
            }
            if masks is not None:
                rule["mask"] = torch.ones(new, keys.shape[0], dtype=torch.bool)
                rule["mask"][:, keys.shape[0] - new :] = masks[index]
            query = q[part].view(new, shape.heads, shape.head_dim)
            expected, _ = attention(query, keys, values, **rule)
            amplitude, _ = attention(query, keys, values.abs(), **rule)
            got = out[part].view(new, shape.heads, shape.head_dim_v)
            assert_close(f"layer {layer.layer_id}, request {request}", got, expected, amplitude=amplitude)

    def remember(self, layer: Any, request: int, k: torch.Tensor, v: torch.Tensor) -> None:
        kept = []
        for x, scale in ((k, layer.k_scale_float), (v, layer.v_scale_float)):
            dtype = getattr(torch, self.shape.kv_dtype)
            kept.append((x / scale).to(dtype).float() * scale if scale is not None else x.to(dtype).float())
        before = self.stored.get((layer.layer_id, request))
        self.stored[layer.layer_id, request] = (
            (kept[0], kept[1])
            if before is None
            else (torch.cat([before[0], kept[0]]), torch.cat([before[1], kept[1]]))
        )


def run_all(engine: Engine) -> None:
    for mode, lengths in STEPS:
        batch = engine.step(mode, lengths)
        engine.backend.init_forward_metadata(batch)
        for layer in engine.layers:
            engine.check_layer(layer, batch)
