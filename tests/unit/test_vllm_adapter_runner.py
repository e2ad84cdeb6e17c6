# SPDX-License-Identifier: Apache-2.0
"""What model runner V2 hands over when it captures a graph and when it replays it: the same memory."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils", reason="vLLM with model runner V2 is not installed")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.utils import AttentionGroup
from vllm_step import make_builder, make_layer, stand_in_config

from fi_backend.adapters.vllm.backend import FiBackend
from fi_backend.core.attention import BatchAttention

REQUESTS, TOKENS, BLOCKS = 8, 64, 4


class _State(DefaultModelState):
    # Attributes in one version and properties in another.
    max_model_len = 128
    supports_mm_inputs = False


class _Runner:
    """The parts of the runner that lie between its buffers and a builder; the rest needs Triton."""

    def __init__(self, builder: Any) -> None:
        self.buffers = InputBuffers(REQUESTS, TOKENS, torch.device("cpu"))
        self.tables = object.__new__(BlockTables)
        self.tables.input_block_tables = [torch.zeros(REQUESTS, BLOCKS, dtype=torch.int32)]
        self.tables.slot_mappings = torch.zeros(1, TOKENS, dtype=torch.int64)
        self.tables.cp_size = 1
        self.state = object.__new__(_State)
        self.groups = [[AttentionGroup(FiBackend, ["layer"], None, 0, metadata_builders=[builder])]]
        self.caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])

    def capture(self, requests: int, tokens: int) -> Any:
        """Return the metadata of the dummy step that a full graph is captured with."""
        # Later versions than 0.26 ask.
        full = {"full_cudagraph"} & inspect.signature(prepare_inputs_to_capture).parameters.keys()
        prepared = prepare_inputs_to_capture(
            requests,
            tokens,
            self.state,
            self.buffers,
            self.tables,
            self.groups,
            self.caches,
            **dict.fromkeys(full, True),
        )
        return prepared[0]["layer"]

    def replay(self, lengths: list[int], requests: int, tokens: int) -> Any:
        """Return the metadata of a step of `lengths` query tokens, padded to the size of a graph."""
        batch = InputBatch.make_dummy(len(lengths), sum(lengths), self.buffers)
        starts = np.full(requests + 1, sum(lengths), dtype=np.int32)
        starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
        self.buffers.query_start_loc[: requests + 1] = torch.from_numpy(starts)
        padded = replace(
            batch,
            num_reqs_after_padding=requests,
            num_tokens_after_padding=tokens,
            query_start_loc=self.buffers.query_start_loc[: requests + 1],
            query_start_loc_np=starts,
            seq_lens=self.buffers.seq_lens[:requests],
            seq_lens_cpu_upper_bound=torch.zeros(requests, dtype=torch.int32),
        )
        metadata = self.state.prepare_attn(
            padded,
            CUDAGraphMode.FULL,
            tuple(table[:requests] for table in self.tables.input_block_tables),
            self.tables.slot_mappings[:, :tokens],
            self.groups,
            self.caches,
        )
        return metadata["layer"]


@pytest.mark.parametrize(("requests", "tokens"), [(4, 4), (8, 32), (1, 1)])
def test_a_replay_reads_what_the_capture_saw(
    monkeypatch: pytest.MonkeyPatch, requests: int, tokens: int
) -> None:
    config = stand_in_config(monkeypatch)
    config.scheduler_config.max_num_seqs = REQUESTS
    make_layer(config, "layer")
    seen = []

    def plan(self: BatchAttention, qo_indptr: Any, table: Any, **_: Any) -> None:
        read = (qo_indptr, table.kv_lens, table.indices, table.row_begin, table.row_end)
        seen.append([(tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in read])

    monkeypatch.setattr(BatchAttention, "plan", plan)
    runner = _Runner(make_builder(config, ["layer"]))
    captured = runner.capture(requests, tokens)
    lengths = [1] * max(1, requests // 2)
    replayed = runner.replay(lengths, requests, tokens)
    assert seen[0] == seen[1]
    assert captured.attention is replayed.attention
    assert (captured.num_actual_tokens, replayed.num_actual_tokens) == (tokens, len(lengths))
