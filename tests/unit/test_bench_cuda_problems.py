# SPDX-License-Identifier: Apache-2.0
"""What `bench kernels --device cuda` measures: workloads, what peers are told, sampled errors, the bound."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench_peers import PREFIXED, SPEC

from fi_backend.benchmarks.cuda import cases as workloads
from fi_backend.benchmarks.cuda import fa3, flashinfer_peers
from fi_backend.benchmarks.cuda.cases import Case, contiguous, layers_for, make_problem, slots
from fi_backend.benchmarks.cuda.exact import errors, sample_problem
from fi_backend.benchmarks.cuda.fa3 import own_begins
from fi_backend.benchmarks.cuda.flashinfer_peers import page_lists
from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.peers import Problem, SharedPrefix
from fi_backend.benchmarks.workloads import Workload
from fi_backend.errors import UnsupportedError


def test_the_bound_by_hand() -> None:
    # Logs of the ratios: ln 2 - 0.1, ln 2, ln 2 + 0.1; their deviation is 0.1.
    ratio, upper = ratio_with_upper_bound([2 * math.exp(-0.1), 2.0, 2 * math.exp(0.1)], [1.0, 1.0, 1.0])
    assert ratio == pytest.approx(2)
    assert upper == pytest.approx(2 * math.exp(2.920 * 0.1 / math.sqrt(3)))
    # What slows both in one run leaves the ratio sure.
    assert ratio_with_upper_bound([1, 5, 2], [2, 10, 4]) == pytest.approx((0.5, 0.5))
    assert ratio_with_upper_bound([1.0, 2.0] * 20, [1.0] * 40)[1] > math.sqrt(2)
    with pytest.raises(ValueError, match="got 1 and 1"):
        ratio_with_upper_bound([1.0], [1.0])
    with pytest.raises(ValueError, match="got 3 and 2"):
        ratio_with_upper_bound([1.0] * 3, [1.0] * 2)


def test_workloads_are_those_of_the_targets() -> None:
    rows = {case.name: case for case in workloads.cases()}
    assert len(rows) == len(workloads.cases()) == 24
    zipf = rows["dec_zipf_128xmean2k"]
    assert sum(zipf.workload.kv_lens) == pytest.approx(128 * 2048, rel=0.001)
    assert max(zipf.workload.kv_lens) > 20 * 2048
    assert all(512 <= length <= 1024 for length in rows["dec_unif_16x512-1k"].workload.kv_lens)
    shared = rows["shared_64x(8k+256)"]
    assert shared.workload.kv_bytes(shared.spec) == (8192 + 64 * 256) * 8 * 256 * 2
    assert shared.workload.io_bytes(shared.spec) == 64 * 32 * 256 * 2
    fp8, wide = rows["fp8kv_dec_const_64x4k"], rows["dec_const_64x4k"]
    assert 2 * fp8.workload.kv_bytes(fp8.spec) == wide.workload.kv_bytes(wide.spec)
    l2 = 60 << 20
    for case in rows.values():
        layers = layers_for(case, l2)
        assert layers >= 4
        # What is read between two uses of the same layer.
        assert (layers - 1) * case.workload.kv_bytes(case.spec) > 2 * l2


def test_layers_differ_and_prefixes_share_pages() -> None:
    problem = make_problem(Case(PREFIXED, SPEC), layers=2, device="cpu")
    assert not torch.equal(problem.layers[0][0], problem.layers[1][0])
    table = problem.block_table
    assert torch.equal(table[0, :2], table[1, :2])
    assert torch.equal(table[2, :3], table[3, :3])
    used = torch.cat([table[0, :5], table[1, 2:5], table[2, :4], table[3, 3:4]])
    # Every page of the cache belongs to somebody, and to one.
    assert sorted(used.tolist()) == list(range(problem.layers[0][0].shape[0]))
    assert problem.qo_indptr.tolist() == [0, 1, 2, 3, 6]
    again = make_problem(Case(PREFIXED, SPEC), layers=2, device="cpu")
    assert torch.equal(again.q, problem.q)
    assert torch.equal(again.block_table, table)


def test_lists_of_pages_and_slots() -> None:
    problem = make_problem(Case(PREFIXED, SPEC), layers=1, device="cpu")
    indptr, indices, last = page_lists(problem)
    assert indptr.tolist() == [0, 5, 10, 14, 18]
    assert last.tolist() == [6, 16, 1, 16]
    assert indices[10:14].tolist() == problem.block_table[2, :4].tolist()
    found = slots(problem)
    assert found.numel() == 70 + 80 + 49 + 64
    assert int(found[70 + 33]) == int(problem.block_table[1, 2]) * 16 + 1


def test_prefixes_of_one_call() -> None:
    assert own_begins(PREFIXED.prefixes, 4) == [32, 32, 48, 48]
    for prefixes in ((SharedPrefix(32, 0, 2),), (SharedPrefix(32, 2, 4), SharedPrefix(16, 0, 2))):
        with pytest.raises(UnsupportedError, match="do not cover"):
            own_begins(prefixes, 4)


def test_fa3_called_twice_sees_every_key_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Call:
        """What FlashAttention computes for paged KV, from the same arguments; its lse is [heads, tokens]."""

        def __init__(self, problem: Problem, *, qo_indptr, kv_lens, block_table, causal) -> None:
            self.arguments = problem, qo_indptr.tolist(), kv_lens.tolist(), block_table, causal

        def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            problem, starts, lens, table, causal = self.arguments
            out = torch.empty(problem.q.shape)
            lse = torch.empty(problem.q.shape[1], problem.q.shape[0])
            for request, kv_len in enumerate(lens):
                rows = slice(starts[request], starts[request + 1])
                pages = table[request, : -(-kv_len // 16)].long()
                key, value = (cache[pages].reshape(-1, 2, 64)[:kv_len] for cache in problem.layers[layer])
                q = problem.q[rows].float().transpose(0, 1)
                key, value = (x.float().repeat_interleave(2, 1).transpose(0, 1) for x in (key, value))
                logits = q @ key.transpose(1, 2) / 8
                if causal:
                    n = q.shape[1]
                    logits.masked_fill_(torch.ones(n, kv_len).triu(kv_len - n + 1).bool(), -torch.inf)
                out[rows] = (logits.softmax(-1) @ value).transpose(0, 1)
                lse[:, rows] = logits.logsumexp(-1)
            return out, lse

    def merge(o_a, lse_a, o_b, lse_b, out) -> None:
        weight = torch.sigmoid(lse_a - lse_b).t()[..., None]
        out.copy_(o_a * weight + o_b * (1 - weight))

    monkeypatch.setattr(fa3, "_Call", Call)
    monkeypatch.setitem(sys.modules, "fi_backend.benchmarks.cuda.merge_triton", SimpleNamespace(merge=merge))
    problem = make_problem(Case(PREFIXED, SPEC), layers=2, device="cpu")
    out = fa3.Fa3Cascade().prepare(problem)(1)
    torch.testing.assert_close(out.double(), exact_attention(problem, 1), atol=0.01, rtol=0.01)
    with pytest.raises(UnsupportedError, match="no request shares"):
        fa3.Fa3Cascade().prepare(replace(problem, prefixes=()))


def test_flashinfer_s_cascade_is_told_both_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[list[torch.Tensor]] = []

    class Wrapper:
        def __init__(self, levels: int, *_: object) -> None:
            assert levels == 2

        def plan(self, *levels: list[torch.Tensor], **options: object) -> None:
            planned.extend(levels[:4])
            assert levels[4:] == (4, 2, 64, 16)
            assert options["causal"] is True

    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(MultiLevelCascadeAttentionWrapper=Wrapper))
    problem = make_problem(Case(PREFIXED, SPEC), layers=1, device="cpu")
    flashinfer_peers.Cascade().prepare(problem)
    (queries, starts, pages, last) = planned
    assert [level.tolist() for level in queries] == [[0, 2, 6], [0, 1, 2, 3, 6]]
    assert [level.tolist() for level in starts] == [[0, 2, 5], [0, 3, 6, 7, 8]]
    table = problem.block_table
    assert pages[0].tolist() == [*table[0, :2].tolist(), *table[2, :3].tolist()]
    own = [table[0, 2:5], table[1, 2:5], table[2, 3:4], table[3, 3:4]]
    assert pages[1].tolist() == torch.cat(own).tolist()
    assert [level.tolist() for level in last] == [[16, 16], [6, 16, 1, 16]]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_sampled_rows_are_exact_attention(kv_dtype: str) -> None:
    workload = Workload("mixed", (1, 200, 1, 7), (70, 203, 300, 7))
    case = Case(workload, replace(SPEC, kv_dtype=kv_dtype))
    problem = make_problem(case, layers=2, device="cpu")
    sample = sample_problem(problem, 1)
    plain = replace(problem, layers=[(k.float(), v.float()) for k, v in problem.layers])
    whole = exact_attention(plain, 1)
    torch.testing.assert_close(sample.exact, whole[sample.rows])
    # Both ends of the prefill, its tile edges, and the decode rows.
    assert {0, 1, 2, 16, 17, 64, 65, 128, 129, 200, 201, 202, 208} <= set(sample.rows.tolist())
    # The two may add in another order, where a processor's products of matrices depend on their shapes.
    whole[sample.rows] = sample.exact
    assert errors(whole, sample).largest == 0
    wrong = whole.clone()
    wrong[200] += 0.5
    assert errors(wrong, sample).largest == pytest.approx(0.5)
    assert 0 < errors(wrong, sample).rms < 0.5
    # A row outside the sample counts when it is missing.
    [unsampled, *_] = set(range(209)) - set(sample.rows.tolist())
    whole[unsampled, 0, 0] = float("nan")
    assert errors(whole, sample).largest == math.inf


def test_contiguous_kv_is_the_same_memory() -> None:
    problem = make_problem(Case(PREFIXED, SPEC), layers=1, device="cpu")
    own = contiguous(make_problem(Case(replace(PREFIXED, prefixes=()), SPEC), layers=1, device="cpu"))
    assert own.spec.page_size == 1
    assert own.block_table[1, :80].tolist() == list(range(70, 150))
    assert contiguous(problem).layers[0][0].data_ptr() == problem.layers[0][0].data_ptr()
