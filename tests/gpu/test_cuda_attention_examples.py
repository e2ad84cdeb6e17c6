# SPDX-License-Identifier: Apache-2.0
"""The Quest and StreamingLLM examples on CUDA."""

from __future__ import annotations

import pytest
import torch
from gpu_device import capture, device, synchronize
from quest_batch import QuestBatch
from stream_batch import StreamBatch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("attention_modules")]


@pytest.mark.parametrize("top", [1, 4, 16])
def test_quest(top: int) -> None:
    batch = QuestBatch(top, dtype="bfloat16", head_dim=64, device=device())
    batch.append()
    batch.compare(*batch.run())


def test_quest_chooses_anew_in_a_graph() -> None:
    batch = QuestBatch(4, dtype="bfloat16", head_dim=64, device=device())
    batch.append()
    batch.run()
    results = []
    replay = capture(lambda: results.append(batch.run()))
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        batch.q.copy_(torch.randn(batch.q.shape, generator=random))
        replay()
        synchronize()
        batch.compare(*results[-1])


def test_streaming() -> None:
    stream = StreamBatch("bfloat16", head_dim=64, device=device())
    for counts in ((13, 2), (5, 9), *[(1, 1)] * 30, (0, 3)):
        stream.step(counts)
