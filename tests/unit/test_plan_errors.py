# SPDX-License-Identifier: Apache-2.0
"""Bad input to the planner: a typed error with argument, expected and got, and a buffer without a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_cases import PlanCase

from fi_backend.core.planner import CostModel, Limits, Planner
from fi_backend.core.sharing import SharingLimits
from fi_backend.core.spec import AttentionSpec


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_STEPS = {
    "decreasing": (int32(0, 5, 3), int32(9, 9), ValueError, r"^qo_indptr: .*non-decreasing .*got 5 then 3"),
    "negative start": (int32(-2, 1, 3), int32(9, 9), ValueError, r"^qo_indptr\[0\]: expected >= 0; got -2"),
    "negative length": (int32(0, 1, 2), int32(9, -1), ValueError, r"^kv_lens\[1\]: expected >= 0; got -1"),
    "too few starts": (int32(0, 1), int32(9, 9), ValueError, r"^qo_indptr: expected 3 entries.*got 2"),
    "no starts at all": (int32(), int32(), ValueError, r"^qo_indptr: expected 1 entries.*got 0"),
    "too many starts": (int32(0, 1, 2), int32(9), ValueError, r"^qo_indptr: expected 2 entries.*got 3"),
    "too many requests": (
        int32(*range(6)), int32(*[9] * 5), ValueError, r"^kv_lens: expected at most max_requests = 4 .*got 5",
    ),
    "too many tokens": (int32(0, 33), int32(9), ValueError, r"^qo_indptr: .* max_tokens = 32 .*got 33"),
    "too many tokens from an offset": (int32(5, 38), int32(9), ValueError, r"max_tokens = 32 .*got 33"),
    "difference beyond int32": (int32(0, 2**31 - 1), int32(9), ValueError, r"tokens = 32 .*got 2147483647"),
    "too long": (int32(0, 1), int32(1001), ValueError, r"^kv_lens\[0\]: .* max_kv_len = 1000; got 1001"),
    "int64 starts": (int32(0, 1).long(), int32(9), TypeError, r"^qo_indptr: expected int32; got int64"),
    "int64 lengths": (int32(0, 1), int32(9).long(), TypeError, r"^kv_lens: expected int32; got int64"),
    "unsigned lengths": (int32(0, 1), int32(9).to(torch.uint32), TypeError, r"^kv_lens: .*int32; got uint32"),
    "float lengths": (int32(0, 1), torch.tensor([9.0]), TypeError, r"^kv_lens: expected int32; got float32"),
    "matrix": (int32(0, 1), int32(9).view(1, 1), ValueError, r"^kv_lens: .*shape \[any\]; got \[1, 1\]"),
    "strided": (int32(0, 7, 1, 7)[::2], int32(9), ValueError, r"^qo_indptr: expected unit stride .*got 2"),
    "list": ([0, 1], int32(9), TypeError, r"argument #1 .*Expected `DLTensor"),
    "none": (int32(0, 1), None, TypeError, r"argument #2 .*Expected `DLTensor"),
}  # fmt: skip


@pytest.mark.parametrize(("qo_indptr", "kv_lens", "kind", "message"), BAD_STEPS.values(), ids=BAD_STEPS)
@pytest.mark.parametrize("invariant", [False, True])
def test_bad_lengths_leave_the_plan_as_it_was(
    qo_indptr: Any, kv_lens: Any, kind: type[Exception], message: str, invariant: bool
) -> None:
    spec = AttentionSpec(8, 2, 64, batch_invariant=invariant)
    planner = Planner(spec, Limits(4, 32, 1000), num_ctas=8, costs=CostModel(), planned_queues=True)
    buffer = torch.full((planner.layout.total,), 0xCD, dtype=torch.uint8)
    planner.plan(int32(0, 3, 4), int32(700, 1000), buffer)
    before = buffer.clone()
    with pytest.raises(kind, match=message):
        planner.plan(qo_indptr, kv_lens, buffer)
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda b: b[:-1], ValueError, r"^plan buffer: expected \d+ bytes; got \d+"),
        (lambda b: b.view(torch.int32), TypeError, "^plan buffer: expected uint8; got int32"),
        (
            lambda b: torch.zeros(2 * b.numel(), dtype=torch.uint8)[::2],
            ValueError,
            "^plan buffer: expected unit stride",
        ),
    ],
)
def test_bad_buffers_are_not_written(change: Any, kind: type[Exception], message: str) -> None:
    case = PlanCase((1,), (9,))
    planner = case.planner()
    buffer = change(torch.zeros(planner.layout.total, dtype=torch.uint8))
    with pytest.raises(kind, match=message):
        case.fill(planner, buffer)
    assert not buffer.any()


@pytest.mark.parametrize("name", ["max_requests", "max_tokens", "max_kv_len"])
@pytest.mark.parametrize(
    ("value", "kind"), [(0, ValueError), (-1, ValueError), (2**31, ValueError), (1.5, TypeError)]
)
def test_limits_are_checked(name: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"^{name}: expected .*got {value}"):
        Limits(**{"max_requests": 1, "max_tokens": 1, "max_kv_len": 1, name: value})


@pytest.mark.parametrize("name", ["granule", "min_chunk", "invariant_grid", "beta"])
def test_costs_that_would_divide_by_zero_are_refused(name: str) -> None:
    zero: Any = (1, 1, 0, 1, 1) if name == "beta" else 0
    with pytest.raises(ValueError, match=rf"^{name}(\[2\])?: expected 1 .*got 0"):
        CostModel(**{name: zero})


def test_costs_have_one_beta_a_tile_and_are_integers() -> None:
    with pytest.raises(ValueError, match=r"^beta: expected 5 costs"):
        CostModel(beta=(1, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^alpha: expected an int; got 0.5"):
        CostModel(alpha=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^part_cost: expected 0 .*got -1"):
        CostModel(part_cost=-1)


@pytest.mark.parametrize(
    ("num_ctas", "kind"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), (None, TypeError)]
)
def test_num_ctas_is_checked(num_ctas: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"^num_ctas: expected"):
        Planner(AttentionSpec(1, 1, 64), Limits(1, 1, 1), num_ctas=num_ctas, costs=CostModel())


@pytest.mark.parametrize("tiles", [(2, 16), (16, 1), (1, 256), (16,), (0, 128)])
def test_tiles_are_two_heights_in_order(tiles: Any) -> None:
    with pytest.raises(ValueError, match=r"^tiles: expected the least and the greatest height of \(1, 16"):
        Planner(AttentionSpec(1, 1, 64), Limits(1, 1, 1), num_ctas=1, costs=CostModel(), tiles=tiles)


def test_limits_whose_tickets_do_not_fit_int32_are_refused_at_construction() -> None:
    """A ticket is (item, KV head): the counter that CTAs draw them from has 32 bits."""
    limits = Limits(2**16, 2**16, 10)
    with pytest.raises(ValueError, match=r"expected a plan of fewer than 2\^31 entries; got 42950"):
        Planner(AttentionSpec(2**16, 2**16, 64), limits, num_ctas=1, costs=CostModel())
    Planner(AttentionSpec(2**14, 2**14, 64), limits, num_ctas=1, costs=CostModel())


@pytest.mark.parametrize("tokens", [2**25, 2**26, 2**31 - 1])
def test_limits_whose_packed_rows_do_not_fit_int32_are_refused_at_construction(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"max_tokens: expected a plan of fewer than 2\^31 entries; got"):
        Planner(AttentionSpec(64, 1, 64), Limits(4, tokens, 10), num_ctas=1, costs=CostModel())


@pytest.mark.parametrize("sharing", [(2**31 - 1, 1, 1), (1, 2**31 - 1, 2**31 - 1), (2**31 - 1,) * 3])
def test_sharing_limits_that_do_not_fit_int32_are_named(sharing: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"^max_requests, max_tokens, sharing: expected a plan of fewer"):
        Planner(AttentionSpec(64, 1, 64), Limits(4, 4, 10), num_ctas=1, costs=CostModel(),
                sharing=SharingLimits(*sharing))  # fmt: skip
