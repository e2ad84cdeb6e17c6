# SPDX-License-Identifier: Apache-2.0
"""SGLang's runner of graphs, played on the CPU: a replay runs the captured native calls again, on the tensors
of the capture, after the scheduler has overwritten what it may overwrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang_step import Engine

from fi_backend.adapters.sglang import backend as backend_module
from fi_backend.core import attention_call


@contextmanager
def recording(calls: list[Callable[[], Any]]) -> Iterator[None]:
    """Run native calls and keep them."""

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(lambda: function(*args, **kwargs))
            return function(*args, **kwargs)

        return call

    with (
        patch.object(backend_module, "append_kv", kept(backend_module.append_kv)),
        patch.object(attention_call, "run_attention", kept(attention_call.run_attention)),
    ):
        yield


class Graph:
    """A captured step of `requests` requests with `width` query tokens each; fewer may replay it."""

    def __init__(
        self, engine: Engine, mode: Any, *, requests: int = 4, width: int = 1, spec_info: Any = None
    ) -> None:
        shape, tokens = engine.shape, requests * width
        self.engine, self.mode, self.requests, self.width = engine, mode, requests, width
        self.rows = torch.zeros(requests, dtype=torch.int64)
        self.seq_lens = torch.ones(requests, dtype=torch.int64)
        self.seq_lens_cpu = torch.ones(requests, dtype=torch.int64)
        self.slots = torch.zeros(tokens, dtype=torch.int64)
        sizes = (
            (shape.heads * shape.head_dim,),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim_v),
        )
        dtype = engine.runner.dtype
        self.inputs = [[torch.zeros(tokens, *size, dtype=dtype) for size in sizes] for _ in engine.layers]
        self.calls: list[Callable[[], Any]] = []
        backend = engine.backend
        backend.init_cuda_graph_state(requests, tokens)
        assert backend.get_cuda_graph_seq_len_fill_value() == 1
        batch = self._view(requests, self.slots, spec_info)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        for calls in ([], [], self.calls):  # SGLang warms up twice
            with recording(calls):
                backend.init_forward_metadata_in_graph(batch)
                self.outs = [
                    backend.forward(*given, layer, batch, **engine.options)
                    for layer, given in zip(engine.layers, self.inputs, strict=True)
                ]

    def replay(self, batch: SimpleNamespace, *, masks: Any = None) -> None:
        """Serve a step and compare its layers with the oracle; masks: see Engine.check_layer()."""
        engine, active = self.engine, batch.batch_size
        for static, live, filler in (
            (self.rows, batch.req_pool_indices, 0),
            (self.seq_lens, batch.seq_lens, 1),
            (self.seq_lens_cpu, batch.seq_lens, 1),
            (self.slots, batch.out_cache_loc, 0),
        ):
            static[: live.shape[0]] = live
            static[live.shape[0] :] = filler
        for given in self.inputs:
            for tensor in given:
                tensor.copy_(engine.normal(*tensor.shape))
        for out in self.outs:
            out.fill_(torch.nan)
        view = self._view(active, batch.out_cache_loc, batch.spec_info)
        if batch.seq_lens_cpu is None:
            view.seq_lens_cpu = None
        engine.backend.init_forward_metadata_out_graph(view)
        table = engine.runner.req_to_token_pool.req_to_token
        kept = table.clone()
        table.zero_()  # the scheduler is free to, from here on
        for call in self.calls:
            call()
        table.copy_(kept)
        for layer, (q, k, v), out in zip(engine.layers, self.inputs, self.outs, strict=True):
            engine.compare(layer, q, k, v, out, masks=masks)

    def _view(self, active: int, slots: Any, spec_info: Any) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=self.mode,
            batch_size=self.requests,
            num_padding=self.requests - active,
            req_pool_indices=self.rows,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu,
            out_cache_loc=slots,
            spec_info=spec_info,
        )
