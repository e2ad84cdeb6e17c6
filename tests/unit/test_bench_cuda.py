# SPDX-License-Identifier: Apache-2.0
"""`bench kernels --device cuda` without a GPU: workloads, sampled errors, statistics, rows and the record."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fi_backend.benchmarks.cuda import cases as workloads
from fi_backend.benchmarks.cuda import fa3, flashinfer_peers, measure
from fi_backend.benchmarks.cuda.cases import Case, contiguous, layers_for, make_problem, slots
from fi_backend.benchmarks.cuda.ceilings import read_module
from fi_backend.benchmarks.cuda.exact import Errors, errors, sample_problem
from fi_backend.benchmarks.cuda.fa3 import own_begins
from fi_backend.benchmarks.cuda.flashinfer_peers import page_lists
from fi_backend.benchmarks.cuda.measure import CudaTiming, time_case
from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.interval import ratio_with_upper_bound
from fi_backend.benchmarks.peers import Peer, Problem, Run, SharedPrefix
from fi_backend.benchmarks.workloads import Workload
from fi_backend.cli import bench_cuda
from fi_backend.cli.main import app
from fi_backend.core import jit
from fi_backend.core.jit.compiler import toolchain
from fi_backend.core.spec import AttentionSpec
from fi_backend.errors import BuildError, UnsupportedError

SPEC = AttentionSpec(4, 2, 64, dtype="bfloat16", page_size=16)
PREFIXED = Workload(
    "prefixed", (1, 1, 1, 3), (70, 80, 49, 64), (SharedPrefix(32, 0, 2), SharedPrefix(48, 2, 4))
)
CEILINGS = {"read_gbs": 10.0, "copy_gbs": 12.0, "matmul_tflops": 0.5}


class Ticks:
    """Microseconds of a pretended device: every layer's call takes 100, and the product behind it 2000."""

    now = 0.0


class EagerStep:
    """Stands for a captured graph: a replay runs the layers."""

    def __init__(self, run: Run, layers: int) -> None:
        self._run, self._layers = run, layers
        self.output = run(layers - 1)

    def replay(self) -> None:
        for layer in range(self._layers):
            self._run(layer)

    def time_us(self) -> float:
        begin = Ticks.now
        self.replay()
        return Ticks.now - begin


class EagerClock:
    """Runs on the CPU at once."""

    def capture(self, run: Run, layers: int) -> EagerStep:
        def with_product(layer: int) -> torch.Tensor:
            Ticks.now += 100 + 2000
            return run(layer)

        return EagerStep(with_product, layers)

    def capture_spacers(self, layers: int) -> EagerStep:
        def product(_: int) -> torch.Tensor:
            Ticks.now += 2000
            return torch.empty(0)

        return EagerStep(product, layers)


class Fixed(Peer):
    """Writes a given answer and takes so many microseconds more."""

    def __init__(self, name: str, answer: Callable[[Problem], torch.Tensor], us: float = 0) -> None:
        self.name = name  # type: ignore[misc]
        self.answer, self.us = answer, us

    def unavailable(self) -> str | None:
        return None

    def prepare(self, problem: Problem) -> Run:
        answers = [self.answer(replace(problem, layers=[layer])) for layer in problem.layers]
        out = torch.empty_like(problem.q)

        def run(layer: int) -> torch.Tensor:
            Ticks.now += self.us
            return out.copy_(answers[layer])

        return run


def exact(problem: Problem) -> torch.Tensor:
    return exact_attention(problem, 0)


def measured(case: Case, peers: list[Peer], runs: int = 3) -> CudaTiming:
    problem = make_problem(case, layers=2, device="cpu")
    return time_case(case, problem, peers, EagerClock(), CEILINGS, runs=runs)


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


def test_a_row() -> None:
    def refuse(_: Problem) -> torch.Tensor:
        raise UnsupportedError("no prefix")

    def fail(_: Problem) -> torch.Tensor:
        raise RuntimeError("out of\nregisters")

    case = Case(replace(PREFIXED, prefixes=()), SPEC, ("ragged", "planned_queues"))
    peers: list[Peer] = [
        Fixed("slow", exact, 300),
        Fixed("good", exact, 100),
        Fixed("wrong", lambda p: exact(p) + 0.5),
        Fixed("silent", lambda p: torch.full_like(p.q, float("nan"))),
        Fixed("refused", refuse),
        Fixed("broken", fail),
    ]
    row = measured(case, peers)
    assert row.best_peer == "good"
    assert row.wrong == ["wrong", "silent"]
    assert row.not_measured == {"refused": "no prefix", "broken": "RuntimeError: out of registers"}
    assert set(row.variants) == {"ragged", "planned_queues"}
    # The product's time is taken off.
    assert (row.ours_us, row.ours_spread, row.spacer_us) == (100, (100, 100), 2000)
    assert row.peers == {"slow": 400, "good": 200, "wrong": 100, "silent": 100}
    assert (row.ratio, row.ratio_upper95) == (0.5, 0.5)
    assert row.max_err is not None
    assert row.max_err < 0.02
    assert all(each["max_err"] is not None and each["max_err"] < 0.02 for each in row.variants.values())
    assert row.peers_max_err["wrong"] == pytest.approx(0.5, abs=0.02)
    assert row.peers_max_err["silent"] is None
    assert {name: len(times) for name, times in row.runs.items()} == dict.fromkeys(
        ("fi", "ragged", "planned_queues", "slow", "good", "wrong", "silent"), 3
    )
    read_us = (263 * 256 * 2 + 2 * 6 * 4 * 64 * 2) / 10e3
    assert row.floor_us == pytest.approx(read_us, abs=0.01)
    assert row.bandwidth_share == pytest.approx(row.floor_us / 100, abs=1e-3)


def test_the_order_changes_from_run_to_run() -> None:
    calls: list[str] = []

    class Noted(EagerStep):
        def __init__(self, name: str) -> None:
            self.name = name
            self.output = torch.zeros(1)

        def replay(self) -> None:
            pass

        def time_us(self) -> float:
            calls.append(self.name)
            return 1.0

    names = ["a", "b", "c"]
    contenders = {name: measure._Contender(Noted(name), Errors(0, 0)) for name in names}
    measure._interleave(contenders, Noted("product"), 1, 4)
    rounds = [calls[i : i + 4] for i in range(0, 16, 4)]
    assert all(sorted(each) == ["a", "b", "c", "product"] for each in rounds)
    assert len({tuple(each) for each in rounds}) >= 3
    assert all(len({each.index(name) for each in rounds}) >= 2 for name in names)


def test_ours_failing_leaves_a_gap() -> None:
    case = Case(replace(PREFIXED, prefixes=()), SPEC)
    problem = make_problem(case, layers=2, device="cpu")
    broken = replace(problem, spec=replace(SPEC, alibi=True))
    row = time_case(case, broken, [Fixed("good", exact)], EagerClock(), CEILINGS, runs=3)
    assert (row.ours_us, row.ours_spread, row.max_err, row.ratio, row.bandwidth_share) == (None,) * 5
    assert "alibi_slopes" in row.not_measured["fi"]
    assert row.best_peer == "good"


def test_batch_invariant_row_has_the_cost_beside_it() -> None:
    case = Case(replace(PREFIXED, prefixes=()), replace(SPEC, batch_invariant=True), ("not_invariant",))
    row = measured(case, [Fixed("good", exact)])
    assert row.variants["not_invariant"]["us"] == 100
    assert "not_invariant" not in row.peers


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command run on the CPU with two small cases and one peer."""
    small = Case(replace(PREFIXED, prefixes=(), name="small"), SPEC, ("ragged",))
    broken = Case(replace(PREFIXED, name="prefixed"), SPEC)
    properties = type("Properties", (), {"L2_cache_size": 1 << 10})

    class Registered:
        def peers(self, device: str) -> list[Peer]:
            missing = Fixed("absent", exact)
            missing.unavailable = lambda: "it is not installed"  # type: ignore[method-assign]
            return [Fixed("exact", exact), missing]

    monkeypatch.setattr(workloads, "cases", lambda: [small, broken])
    monkeypatch.setattr("fi_backend.hooks.plugins", Registered)
    monkeypatch.setattr("fi_backend.benchmarks.cuda.ceilings.cuda_ceilings", lambda _: CEILINGS)
    monkeypatch.setattr("fi_backend.benchmarks.cuda.graphs.GraphClock", lambda *_: EagerClock())
    monkeypatch.setattr(
        "fi_backend.benchmarks.record.gpu_provenance",
        lambda _: {"date": "d", "gpu": "none", "driver": "1", "versions": {}, "command": "c"},
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench_cuda, "torch_device", lambda: torch.device("cpu"))


def test_the_record_grows_row_by_row(
    without_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kernels.json"
    seen: list[int] = []

    def watched(*arguments: object, **options: object) -> CudaTiming:
        seen.append(len(json.loads(out.read_text())["rows"]))
        return time_case(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("fi_backend.benchmarks.cuda.measure.time_case", watched)
    command = ["bench", "kernels", "--device", "cuda", "--runs", "3", "--json", str(out)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert seen == [0, 1]
    document = json.loads(out.read_text())
    keys = {"date", "gpu", "driver", "versions", "command", "ceilings", "rows"}
    assert keys <= set(document)
    assert document["ceilings"] == CEILINGS
    assert document["peers_absent"] == {"absent": "it is not installed"}
    assert [row["workload"] for row in document["rows"]] == ["small", "prefixed"]
    for row in document["rows"]:
        assert {"workload", "ours_us", "ours_spread", "peers", "floor_us", "max_err"} <= set(row)
        assert set(row["peers"]) == {"exact"}
        low, high = row["ours_spread"]
        assert 0 < low <= row["ours_us"] <= high
    first = document["rows"][0]
    assert f"{first['ours_us']:.1f}" in result.stdout
    assert f"{first['ratio_upper95']:.3f}" in result.stdout
    assert f"ragged {first['variants']['ragged']['us']:.1f}" in result.stdout
    assert "absent was not measured: it is not installed" in result.stdout
    assert len(result.stdout.splitlines()) == 5
    assert "small: fi" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


def test_the_kernel_that_reads_compiles() -> None:
    try:
        toolchain("sm_80")
    except BuildError as error:
        pytest.skip(f"needs nvcc: {error}")
    [library] = jit.build_all([read_module("sm_80")])
    assert library.is_file()


def test_without_a_gpu_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    result = CliRunner().invoke(app, ["bench", "kernels", "--device", "cuda"])
    assert result.exit_code == 2
    assert "torch sees none" in result.stderr
