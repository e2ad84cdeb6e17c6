# SPDX-License-Identifier: Apache-2.0
"""The tables of `bench kernels --device cuda`, rows that do not stand, and other ways of ours."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_batch import torch_threads
from bench_peers import CEILINGS, PREFIXED, SHARED, SPEC, EagerClock, EagerStep, Fixed, exact, without_gpu
from typer.testing import CliRunner

from fi_backend.benchmarks.cuda import cases as workloads
from fi_backend.benchmarks.cuda import fa3, measure
from fi_backend.benchmarks.cuda.cases import Case, layers_for, make_problem, single_tokens
from fi_backend.benchmarks.cuda.exact import sample_problem
from fi_backend.benchmarks.cuda.measure import time_case
from fi_backend.benchmarks.cuda.ours import prepare_ours
from fi_backend.benchmarks.cuda.row import CudaTiming, summary
from fi_backend.benchmarks.cuda.tables import TABLES, row_named
from fi_backend.benchmarks.cuda.ways import variant_arguments
from fi_backend.benchmarks.exact import exact_attention
from fi_backend.benchmarks.peers import Peer
from fi_backend.benchmarks.variant_oracles import ORACLES
from fi_backend.benchmarks.workloads import Workload
from fi_backend.cli.main import app
from fi_backend.core.support import unsupported_reason
from fi_backend.errors import UnsupportedError

__all__ = ["without_gpu"]

PLAIN = replace(PREFIXED, prefixes=(), name="plain")
FLOATS = replace(SPEC, dtype="float32", kv_dtype="float32")


def measured(case: Case, peers: list[Peer], clock: Any = None) -> CudaTiming:
    problem = make_problem(case, layers=2, device="cpu")
    with torch_threads(2):
        return time_case(case, problem, peers, clock or EagerClock(), CEILINGS, runs=3)


def test_prefills_by_head_dimension_have_as_many_tokens_at_every_length() -> None:
    rows = TABLES["prefill-dims"]()
    assert len({case.name for case in rows}) == len(rows) == 3 * 2 * 7
    assert {(case.spec.head_dim, case.spec.kv_dtype) for case in rows} == {
        (dim, dtype) for dim in (64, 128, 256) for dtype in ("bfloat16", "float8_e4m3fn")
    }
    for case in rows:
        assert case.spec.dtype == "bfloat16"
        assert case.workload.q_lens == case.workload.kv_lens
        assert len(set(case.workload.q_lens)) == 1
        assert 16384 <= case.workload.tokens <= 65536
    lengths = [case.workload.kv_lens[0] for case in rows if case.name.startswith("pre_d256_e4m3")]
    assert lengths == [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    wide = row_named("pre_d256_bf16_4x4k")
    assert (wide.spec.num_qo_heads, wide.spec.num_kv_heads, wide.workload.tokens) == (16, 4, 16384)


def test_decodes_by_page_size_and_group() -> None:
    rows = TABLES["decode-pages"]()
    shapes = Counter((case.spec.head_dim, case.spec.group_size, case.spec.page_size) for case in rows)
    assert shapes == Counter((d, g, p) for d in (64, 128, 256) for g in (1, 4, 5, 7, 8) for p in (1, 16, 64))
    assert len({case.name for case in rows}) == 45
    for case in rows:
        assert case.name == (
            f"dec_d{case.spec.head_dim}_g{case.spec.group_size}_page{case.spec.page_size}_64x4k"
        )
        assert case.variants == (("page1",) if case.spec.page_size == 16 else ())


def test_every_row_has_a_kernel_and_fits() -> None:
    names = [case.name for rows in TABLES.values() for case in rows()]
    assert len(set(names)) == len(names)
    for rows in TABLES.values():
        for case in rows():
            assert unsupported_reason(case.spec, "cuda") is None
            held = layers_for(case, 60 << 20) * case.workload.kv_bytes(case.spec)
            assert held < 20 << 30, f"{case.name} keeps {held >> 30} GiB of caches"
    with pytest.raises(ValueError, match="got 'no_such_row'"):
        row_named("no_such_row")


def test_a_row_fails_where_nothing_was_shared() -> None:
    """The plan is right but reads every prefix again, which a figure alone does not show."""
    good = Fixed("good", exact)
    row = measured(Case(SHARED, SPEC), [good])
    assert (row.prefix_nodes, row.failed) == (1, [])
    few = measured(Case(PREFIXED, SPEC), [good])
    assert few.prefix_nodes == 0
    assert few.failed == ["fi: expected prefix nodes in the plan of requests that share prefixes; got 0"]
    assert summary([row, few])["failed"] == {"prefixed": few.failed}


def test_a_row_fails_where_ours_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the peers, and by its own size where there are none."""
    prepare = prepare_ours

    def off_by(error: float) -> Any:
        def prepared(*arguments: Any, **options: Any) -> Any:
            ours = prepare(*arguments, **options)
            return ours._replace(run=lambda layer: ours.run(layer).add_(error))

        return prepared

    good = Fixed("good", exact)
    for error, peers, reason in (
        (0.02, [good], "times the smallest of the peers"),
        (0.1, [], "expected at most"),
        (float("inf"), [good], "missing, NaN or infinite"),
    ):
        monkeypatch.setattr(measure, "prepare_ours", off_by(error))
        [found, *_] = reversed(measured(Case(PLAIN, SPEC), peers).failed)
        assert found.startswith("fi: "), found
        assert reason in found


def test_a_peer_with_a_mark_is_shown_and_never_the_best() -> None:
    rounded = Fixed("rounded", lambda p: exact(p) + 0.01, mark="queries of fewer bits")
    row = measured(Case(PLAIN, SPEC), [rounded, Fixed("good", exact, 300)])
    assert row.best_peer == "good"
    assert row.marked == {"rounded": "queries of fewer bits"}
    assert row.wrong == []
    assert row.ratios == {"rounded": (1.0, 1.0), "good": (0.25, 0.25)}
    # Its answer, however near, is no measure of the others.
    near = measured(Case(PLAIN, SPEC), [Fixed("near", lambda p: exact_attention(p, 0).bfloat16(), mark="m")])
    assert (near.best_peer, near.ratio, near.failed) == (None, None, [])


def test_fa3_beside_fp8_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of fp8 queries and a 16-bit output, or of a cache that holds the same numbers."""
    calls: list[tuple[Any, ...]] = []

    def note(*arguments: Any) -> list[torch.Tensor]:
        calls.append(arguments)
        return [torch.zeros(1), torch.zeros(1)]

    ops = SimpleNamespace(fwd=note, get_scheduler_metadata=note)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", ops, raising=False)
    case = Case(PLAIN, replace(SPEC, kv_dtype="float8_e4m3fn"))
    problem = make_problem(case, layers=1, device="cpu")
    fa3.Fa3Fp8Queries().prepare(problem)(0)
    schedule, call = calls
    assert schedule[7] is torch.float8_e4m3fn
    q, k, _, *_, out, starts = call[:8]
    assert (q.dtype, k.dtype, out.dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16)
    assert starts is problem.qo_indptr
    calls.clear()
    fa3.Fa3WideCache().prepare(problem)(0)
    q, k, v, *_ = calls[1]
    assert q is problem.q
    assert k.dtype is v.dtype is torch.bfloat16
    assert torch.equal(k.float(), problem.layers[0][0].float())
    for peer in (fa3.Fa3Fp8Queries(), fa3.Fa3WideCache()):
        assert peer.mark
        with pytest.raises(UnsupportedError, match="cache is e4m3"):
            peer.prepare(make_problem(Case(PLAIN, SPEC), layers=1, device="cpu"))
    with pytest.raises(UnsupportedError, match="different dtypes"):
        fa3.Fa3().prepare(problem)


def test_pages_of_one_token_hold_the_same_memory_in_any_order() -> None:
    problem = make_problem(Case(PLAIN, SPEC), layers=1, device="cpu")
    single = single_tokens(problem)
    assert single.spec.page_size == 1
    assert single.layers[0][0].data_ptr() == problem.layers[0][0].data_ptr()
    lens = problem.kv_lens.tolist()
    used = torch.cat([row[:n] for row, n in zip(single.block_table, lens, strict=True)]).tolist()
    assert sorted(used) == list(range(sum(lens)))
    assert used != sorted(used)
    row = measured(Case(PLAIN, SPEC, ("page1",)), [Fixed("good", exact)])
    assert row.failed == []
    assert row.variants["page1"]["ratio"] == row.variants["page1"]["ratio_upper95"] == 1.0
    assert summary([row])["page1"] == {"plain": [1.0, 1.0]}


def test_shipped_variants_beside_plain_attention() -> None:
    """Each is held against its own definition, and timed against the plain row."""

    class Slower(EagerClock):
        """Calls after the first one take three times as long."""

        def capture(self, run: Any, layers: int) -> EagerStep:
            self.captured = getattr(self, "captured", 0) + 1
            extra = Fixed("", exact, 0 if self.captured == 1 else 200)
            return super().capture(lambda layer: (extra.wait(), run(layer))[1], layers)

    workload = Workload("variants", (1, 1, 9), (700, 33, 1300))
    row = measured(Case(workload, FLOATS, tuple(ORACLES)), [], Slower())
    assert row.failed == []
    assert set(row.variants) == set(ORACLES)
    assert all(each["rms_err"] < 1e-5 for each in row.variants.values() if each["rms_err"] is not None)
    assert summary([row])["attention_variants"]["variants"] == {name: [3.0, 3.0] for name in ORACLES}


@pytest.mark.parametrize("name", ORACLES)
def test_a_variant_s_answer_is_not_the_plain_one(name: str) -> None:
    """Or a row of variants would stand if the variant were left out."""
    problem = make_problem(Case(Workload("w", (1, 9), (1300, 1400)), FLOATS), layers=1, device="cpu")
    plain = sample_problem(problem, 0)
    other = sample_problem(problem, 0, (ORACLES[name], variant_arguments(name, problem)))
    assert torch.equal(plain.rows, other.rows)
    difference = float((plain.exact - other.exact).square().mean().sqrt())
    assert difference > 2.0**-6 * other.rms, f"{name}: {difference / other.rms}"


def test_a_way_that_fails_fails_the_row() -> None:
    row = measured(Case(PLAIN, SPEC, ("no_such_way",)), [])
    [reason] = row.failed
    assert reason.startswith("no_such_way: ValueError: name: expected one of ragged")


@pytest.mark.usefixtures("without_gpu")
def test_the_command_measures_a_table_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "record.json"
    monkeypatch.setattr(workloads, "cases", lambda: [Case(PREFIXED, SPEC)])
    command = ["bench", "kernels", "--device", "cuda", "--runs", "3", "--json", str(out)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "prefixed failed: fi: expected prefix nodes" in result.stdout
    assert list(json.loads(out.read_text())["summary"]["failed"]) == ["prefixed"]

    small = Case(replace(SHARED, name="dec_small"), SPEC)
    monkeypatch.setitem(TABLES, "decode-pages", lambda: [small, Case(PREFIXED, SPEC)])
    options = ["--table", "decode-pages", "--only", "dec_"]
    result = CliRunner().invoke(app, [*command, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stdout
    record = json.loads(out.read_text())
    assert record["table"] == "decode-pages"
    assert [row["workload"] for row in record["rows"]] == ["dec_small"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda", "--table", "sizes"], "--table: expected one of targets, prefill-dims"),
        (["--table", "targets"], "--table: expected --device cuda; got cpu"),
    ],
)
def test_a_table_that_is_not_there(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "kernels", *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr
