# SPDX-License-Identifier: Apache-2.0
"""The oracle against torch's own attention and against cases that can be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import attention, gather, visible


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("group", "causal"), [(1, True), (3, False), (4, True)])
def test_equals_torch(group: int, causal: bool) -> None:
    q, k, v = _random(9, 2 * group, 24), _random(9, 2, 24), _random(9, 2, 10)
    o, lse = attention(q, k, v, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(o, expected.transpose(0, 1))
    assert lse.shape == (9, 2 * group)


def test_equal_logits_average_the_visible_values() -> None:
    v = torch.arange(5.0).view(5, 1, 1)
    o, lse = attention(torch.zeros(2, 1, 4), torch.zeros(5, 1, 4), v, window_left=1)
    assert o.flatten().tolist() == pytest.approx([2.5, 3.5])  # keys 2, 3 and keys 3, 4
    assert lse.flatten().tolist() == pytest.approx([math.log(2)] * 2)


def test_options_by_hand() -> None:
    one = torch.ones(1, 1, 1)
    keys, values = torch.tensor([3.0, 4.0]).view(2, 1, 1), torch.tensor([10.0, 20.0]).view(2, 1, 1)
    o, lse = attention(
        one, keys, values, scale=2.0, soft_cap=5.0, slopes=torch.tensor([0.5]), sinks=torch.tensor([1.0]),
        k_scale=0.5, v_scale=torch.tensor([3.0]),
    )  # fmt: skip
    first, second = math.exp(5 * math.tanh(3 / 5) - 0.5), math.exp(5 * math.tanh(4 / 5))
    total = first + second + math.e
    assert lse.item() == pytest.approx(math.log(total))
    assert o.item() == pytest.approx(3 * (10 * first + 20 * second) / total)


def test_rows_without_keys_are_neutral_with_a_sink_as_well() -> None:
    for kv_len in (0, 2):
        o, lse = attention(
            torch.ones(3, 2, 4), torch.ones(kv_len, 1, 4), torch.ones(kv_len, 1, 4), sinks=torch.zeros(2)
        )
        assert (o[: 3 - kv_len] == 0).all()
        assert torch.isneginf(lse[: 3 - kv_len]).all()
        assert torch.isfinite(lse[3 - kv_len :]).all()


def test_visible_draws_the_last_query_at_the_last_key() -> None:
    assert visible(2, 4, window_left=1).int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible(3, 1).int().tolist() == [[0], [0], [1]]
    mask = torch.tensor([[True, False, True, True]])
    assert visible(1, 4, causal=False, window_left=2, mask=mask).int().tolist() == [[0, 0, 1, 1]]


def test_gather_walks_the_pages_in_order() -> None:
    cache = torch.arange(12.0).view(4, 3, 1, 1).to(torch.float8_e5m2)
    assert gather(cache, [3, 0], 5).flatten().tolist() == [
        8.0,
        10.0,
        12.0,
        0.0,
        1.0,
    ]  # 9 and 11 round to even
    assert gather(cache, [], 0).shape == (0, 1, 1)
