# SPDX-License-Identifier: Apache-2.0
"""Bad input to run(): a typed error with argument, expected and got, and nothing is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from attention_batch import SPLIT_COSTS
from numeric import assert_bitwise_equal
from torch import Tensor

from fi_backend.core.attention import BatchAttention
from fi_backend.core.page_table import PageTable
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import PlanError

SPEC = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16)
INVARIANT_SPEC = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, batch_invariant=True)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """A good step of two requests; a test spoils one thing of it."""

    def __init__(self, spec: AttentionSpec = SPEC) -> None:
        random = torch.Generator().manual_seed(0)
        self.spec = spec
        self.attn = BatchAttention(
            spec, max_requests=4, max_tokens=16, max_kv_len=100, num_ctas=8, costs=SPLIT_COSTS
        )
        self.starts, self.kv_lens = int32(0, 1, 5), int32(90, 20)
        self.blocks = int32(3, 0, 7, 1, 5, 2, 6, 4, -1, -1, -1, -1).view(2, 6)
        self.table = PageTable.from_block_table(self.blocks, self.kv_lens, page_size=16)
        self.arguments: dict[str, Any] = {
            "q": torch.randn(5, 8, 64, generator=random),
            "k_cache": torch.randn(8, 16, 2, 64, generator=random),
            "v_cache": torch.randn(8, 16, 2, 32, generator=random),
            "out": torch.full((5, 8, 32), -7.0),
            "lse": torch.full((5, 8), -7.0),
        }
        self.attn.plan(self.starts, self.table)

    def memory(self) -> list[Tensor]:
        """Everything that run() may write."""
        outputs = [
            self.arguments[name] for name in ("out", "lse") if isinstance(self.arguments[name], Tensor)
        ]
        return [
            *(t for t in outputs if t.device.type == "cpu"),
            self.attn._plan_buffer.tensor,
            self.attn._workspace,
        ]

    def expect_refusal(self, kind: type[Exception], message: str) -> None:
        self.attn._workspace.fill_(0x3C)
        before = [t.clone() for t in self.memory()]
        with pytest.raises(kind, match=message):
            self.attn.run(**self.arguments)
        for actual, expected in zip(self.memory(), before, strict=True):
            assert_bitwise_equal("memory after the error", actual, expected)


def got(*shape: int) -> str:
    return re.escape(f"got [{', '.join(map(str, shape))}]")


BAD_TENSORS = {
    "q dtype": ("q", lambda t: t.bfloat16(), TypeError, r"^q: expected float32; got bfloat16"),
    "q dimensions": ("q", lambda t: t.flatten(1), ValueError, r"^q: expected .*; got .*5, 512"),
    "q heads": ("q", lambda t: t[:, :4], ValueError, r"^q: expected .*8.*; got .*4"),
    "q odd heads": ("q", lambda t: t[:, :7], ValueError, r"^q: expected .*8.*; got .*7"),
    "q head dim": ("q", lambda t: t[:, :, :32], ValueError, r"^q: expected .*64.*; got .*32"),
    "q too few tokens": ("q", lambda t: t[:4], ValueError, r"^out: .*\[4, 8, 32\]; got \[5, 8, 32\]"),
    "q strides": ("q", lambda t: t.mT.contiguous().mT, ValueError, r"^q: .*unit stride"),
    "q device": ("q", lambda t: t.to("meta"), ValueError, r"^q: expected .*; got .*meta"),
    "k dtype": ("k_cache", lambda t: t.half(), TypeError, r"^k_cache: expected float32; got float16"),
    "k bytes": ("k_cache", lambda t: t.view(torch.uint8), TypeError, r"^k_cache: .*; got uint8"),
    "k page size": ("k_cache", lambda t: t.reshape(16, 8, 2, 64), ValueError, "^k_cache: .*16, 8, 2, 64"),
    "k heads": ("k_cache", lambda t: t[:, :, :1], ValueError, r"^k_cache: .*2 KV heads.*16, 1, 64"),
    "k head dim": ("k_cache", lambda t: t[..., :32], ValueError, "^k_cache: .*" + got(8, 16, 2, 32)),
    "k dimensions": ("k_cache", lambda t: t.flatten(0, 1), ValueError, r"^v_cache: .*128 pages.*got 8"),
    "k vector": ("k_cache", lambda t: t.flatten(), ValueError, r"^k_cache: expected \[pages"),
    "k strides": ("k_cache", lambda t: t.mT.contiguous().mT, ValueError, r"^k_cache: .*unit stride"),
    "k device": ("k_cache", lambda t: t.to("meta"), ValueError, r"^k_cache: expected .*; got .*meta"),
    "v dtype": ("v_cache", lambda t: t.double(), TypeError, r"^v_cache: expected float32; got float64"),
    "v pages": ("v_cache", lambda t: t[:7], ValueError, r"^v_cache: expected 8 pages, as k_cache; got 7"),
    "v head dim": ("v_cache", lambda t: t[..., :16], ValueError, r"^v_cache: .*head_dim_v = 32.*2, 16\)"),
    "v heads": ("v_cache", lambda t: t[:, :, :1], ValueError, "^v_cache: .*" + got(8, 16, 1, 32)),
    "v dimensions": ("v_cache", lambda t: t.flatten(0, 1), ValueError, r"^v_cache: expected"),
    "v device": ("v_cache", lambda t: t.to("meta"), ValueError, r"^v_cache: expected .*; got .*meta"),
    "out dtype": ("out", lambda t: t.half(), TypeError, r"^out: expected float32; got float16"),
    "out tokens": ("out", lambda t: t[:4], ValueError, "^out: .*" + got(4, 8, 32)),
    "out head dim": ("out", lambda t: t[..., :31], ValueError, "^out: .*" + got(5, 8, 31)),
    "out strides": ("out", lambda t: t.mT.contiguous().mT, ValueError, r"^out: .*unit stride"),
    "out device": ("out", lambda t: t.to("meta"), ValueError, r"^out: expected .*; got .*meta"),
    "lse dtype": ("lse", lambda t: t.double(), TypeError, r"^lse: expected float32; got float64"),
    "lse shape": ("lse", lambda t: t.T.contiguous(), ValueError, "^lse: .*" + got(8, 5)),
    "k_scale dtype": ("k_scale", lambda _: torch.ones(2).double(), TypeError, r"^k_scale: .*; got float64"),
    "k_scale size": ("k_scale", lambda _: torch.ones(3), ValueError, "^k_scale: .*" + got(3)),
    "v_scale shape": ("v_scale", lambda _: torch.ones(2, 1), ValueError, "^v_scale: .*" + got(2, 1)),
    "v_scale empty": ("v_scale", lambda _: torch.ones(0), ValueError, "^v_scale: .*" + got(0)),
    "slopes unwanted": ("alibi_slopes", lambda _: torch.ones(8), ValueError, r"^alibi_slopes: expected None"),
    "sinks unwanted": ("sinks", lambda _: torch.ones(8), ValueError, r"^sinks: expected None"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "change", "kind", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_do_not_fit_the_spec(
    name: str, change: Any, kind: type[Exception], message: str
) -> None:
    step = Step()
    step.arguments[name] = change(step.arguments.get(name))
    step.expect_refusal(kind, message)


def test_dimensions_that_agree_with_each_other_and_not_with_the_spec() -> None:
    step = Step()
    for name in ("q", "k_cache"):
        step.arguments[name] = step.arguments[name][..., :32].contiguous()
    step.expect_refusal(ValueError, r"^q: expected .*64.*; got .*32")
    step = Step()
    for name in ("v_cache", "out"):
        step.arguments[name] = step.arguments[name][..., :16].contiguous()
    step.expect_refusal(ValueError, r"^v_cache: expected .*32.*; got .*16")


@pytest.mark.parametrize(
    "name", ["q", "k_cache", "v_cache", "out", "lse", "k_scale", "sinks", "alibi_slopes"]
)
def test_what_is_no_tensor(name: str) -> None:
    step = Step(AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, alibi=True, sinks=True))
    step.arguments |= {"sinks": torch.ones(8), "alibi_slopes": torch.ones(8)}
    step.arguments[name] = [1.0, 2.0]
    step.expect_refusal(TypeError, rf"^{name}: expected a .*tensor; got list")


@pytest.mark.parametrize(("option", "name"), [("alibi", "alibi_slopes"), ("sinks", "sinks")])
def test_parameters_that_the_spec_asks_for(option: str, name: str) -> None:
    spec = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, **{option: True})  # type: ignore[arg-type]
    for value, kind, message in [
        (None, ValueError, rf"^{name}: expected a tensor, as the spec says; got None"),
        (torch.ones(7), ValueError, rf"^{option}(_slopes)?: expected shape \[8\]; got \[7\]"),
        (torch.ones(8).half(), TypeError, rf"^{option}(_slopes)?: expected float32; got float16"),
    ]:
        step = Step(spec)
        step.arguments[name] = value
        step.expect_refusal(kind, message)


def test_lengths_that_grew_since_the_plan() -> None:
    step = Step(INVARIANT_SPEC)
    step.kv_lens[1] = 21
    step.expect_refusal(ValueError, r"^kv_lens\[1\]: expected at most 20, .*; got 21")
    step = Step()
    step.kv_lens[0] = -1
    step.expect_refusal(ValueError, r"^kv_lens\[0\]: expected >= 0; got -1")
    step = Step()
    step.starts[1] = 3
    step.expect_refusal(ValueError, r"^qo_indptr: expected at most the 1 query tokens .* request 0 .*; got 3")
    step = Step()
    step.starts[1] = 6
    step.expect_refusal(ValueError, r"^qo_indptr\[2\]: expected a non-decreasing sequence; got 5 after 6")
    step = Step()
    step.starts[0] = -1
    step.expect_refusal(ValueError, r"^qo_indptr\[0\]: expected >= 0; got -1")
    step = Step()
    step.starts += 1
    step.expect_refusal(ValueError, r"^qo_indptr\[2\]: expected at most the 5 tokens of q; got 6")


@pytest.mark.parametrize(
    "lens", [(50, 0), (0, 32), (96, 21), (90, 20)], ids=["shrunk", "swapped", "grown", "equal"]
)
def test_lengths_may_change_since_the_plan(lens: tuple[int, int]) -> None:
    """The first and the last chunk of a tile reach to the true ends."""
    step, fresh = Step(), Step()
    for kv_lens in (step.kv_lens, fresh.kv_lens):
        kv_lens.copy_(int32(*lens))
    fresh.attn.plan(fresh.starts, fresh.table)
    step.attn.run(**step.arguments)
    fresh.attn.run(**fresh.arguments)
    torch.testing.assert_close(step.arguments["out"], fresh.arguments["out"])


def test_both_caches_with_other_heads_than_the_spec() -> None:
    step = Step()
    for name in ("k_cache", "v_cache"):
        step.arguments[name] = step.arguments[name][:, :, :1]
    step.expect_refusal(ValueError, r"^k_cache: expected 2 KV heads.*got \(8, 16, 1, 64\)")


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("tokens", [299, 100, 1])
@pytest.mark.parametrize("kv_len", [300, 304, 60])
def test_query_lengths_that_shrank(tokens: int, kv_len: int, window_left: int) -> None:
    """Where KV lengths do not shrink as well, the queries sit further right than planned."""
    spec = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, window_left=window_left)
    limits = {"max_requests": 1, "max_tokens": 300, "max_kv_len": 304, "num_ctas": 16, "costs": SPLIT_COSTS}
    starts, kv_lens = int32(0, 300), int32(300)
    table = PageTable.from_block_table(torch.arange(19, dtype=torch.int32)[None], kv_lens, page_size=16)
    attn, fresh = BatchAttention(spec, **limits), BatchAttention(spec, **limits)
    attn.plan(starts, table)
    q, k, v = torch.randn(300, 8, 64), torch.randn(19, 16, 2, 64), torch.randn(19, 16, 2, 32)
    starts[1], kv_lens[0] = tokens, kv_len
    fresh.plan(starts, table)
    torch.testing.assert_close(attn.run(q, k, v)[:tokens], fresh.run(q, k, v)[:tokens])


@pytest.mark.parametrize("tokens", [299, 100])
def test_query_lengths_that_shrank_under_a_plan_that_counts_its_states(tokens: int) -> None:
    spec = AttentionSpec(8, 2, 64, head_dim_v=32, dtype="float32", page_size=16, batch_invariant=True)
    attn = BatchAttention(spec, max_requests=1, max_tokens=300, max_kv_len=300, num_ctas=4)
    starts, kv_lens = int32(0, 300), int32(300)
    table = PageTable.from_block_table(torch.arange(19, dtype=torch.int32)[None], kv_lens, page_size=16)
    attn.plan(starts, table)
    q, k, v = torch.randn(300, 8, 64), torch.randn(19, 16, 2, 64), torch.randn(19, 16, 2, 32)
    good = attn.run(q, k, v)
    starts[1] = tokens
    with pytest.raises(ValueError, match=r"^qo_indptr: expected the first query of request 0 at position 0 "):
        attn.run(q, k, v)
    # A request that lost its last tokens altogether still has its queries where they were planned.
    kv_lens[0] = tokens
    torch.testing.assert_close(attn.run(q, k, v)[:tokens], good[:tokens])


@pytest.mark.parametrize("page", [8, 100, -1, 2**31 - 1])
@pytest.mark.parametrize("kind", ["block", "token"])
def test_page_ids_out_of_range_are_named_in_debug_mode(
    page: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FI_BACKEND_DEBUG", "1")
    step = Step()
    step.blocks[1, 1] = page
    if kind == "token":
        slots = (step.blocks.long()[:, :, None] * 16 + torch.arange(16)).clamp(-16, 2**31 - 1).flatten(1)
        table = PageTable.from_token_table(slots.to(torch.int32), int32(0, 1), step.kv_lens, page_size=16)
        step.attn.plan(step.starts, table)
    step.expect_refusal(ValueError, r"^page table: .* in 0\.\.7; got -?\d+ for request 1 at page position 1")
    step.blocks[1, 1] = 7
    if kind == "block":
        step.attn.run(**step.arguments)


@pytest.mark.parametrize("page", [-(2**31), -1, 8, 2**31 - 1])
def test_page_ids_out_of_range_are_not_followed(page: int) -> None:
    """Such a page used to end the process, or to give what stood there."""
    step = Step()
    step.attn.run(**step.arguments)
    expected = step.arguments["out"].clone()
    right = int(step.blocks[1, 1])
    step.blocks[1, 1] = page
    with pytest.raises(ValueError, match=r"^page table: expected page ids inside the 8 pages of k_cache"):
        step.attn.run(**step.arguments)
    step.blocks[1, 1] = right
    step.attn.run(**step.arguments)
    assert_bitwise_equal("out", step.arguments["out"], expected)


def test_caches_of_fewer_pages_than_the_table_names() -> None:
    step = Step()
    few = {name: step.arguments[name][:5] for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=r"^page table: expected page ids inside the 5 pages of k_cache"):
        step.attn.run(**step.arguments | few)
    none = {name: cache[:0] for name, cache in few.items()}
    with pytest.raises(ValueError, match=r"^kv_lens\[0\]: expected 0, since k_cache has no pages; got"):
        step.attn.run(**step.arguments | none)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_t25_lengths_beyond_the_row(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted tokens of speculation may reach past the capacity of a request's row of the table."""
    monkeypatch.setenv("FI_BACKEND_DEBUG", debug)
    step = Step()
    table = PageTable.from_block_table(step.blocks[:, :5], step.kv_lens, page_size=16)
    step.attn.plan(step.starts, table)
    step.expect_refusal(
        ValueError, r"^kv_lens\[0\]: expected at most 80, the capacity of its 5 pages .*; got 90"
    )
    step.kv_lens[0] = 80
    step.attn.run(**step.arguments)


def test_run_before_plan() -> None:
    step = Step()
    step.attn = BatchAttention(SPEC, max_requests=4, max_tokens=16, max_kv_len=100)
    step.expect_refusal(PlanError, r"^run\(\): expected plan\(\) to have been called .*got no plan")
