# SPDX-License-Identifier: Apache-2.0
"""A comparison over several calls: records become one section, equal rates are pooled, others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from serving_bench import bench, virtual_load

from fi_backend.benchmarks.serving import session
from fi_backend.benchmarks.serving.bounds import percentile_bounds
from fi_backend.benchmarks.serving.merge import Source, merge
from fi_backend.benchmarks.serving.pool import Part, pool, read_requests
from fi_backend.benchmarks.serving.records import REQUESTS, read_record, write_record
from fi_backend.benchmarks.serving.summary import Objective
from fi_backend.cli.main import app

RUN = CliRunner()
OBJECTIVES = [Objective("ttft_ms", 99, 60000.0)]
Call = Callable[..., Path]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Measure on the fake server into a folder of the given name; return the folder."""
    monkeypatch.setattr(session, "run_load", virtual_load)

    def measure(name: str, *arguments: str, rates: str = "20,40", status: int = 0) -> Path:
        grid = ("--rates", rates) if rates else ()
        result = bench(monkeypatch, tmp_path / name, *grid, *arguments)
        assert result.exit_code == status, result.output
        return tmp_path / name

    return measure


def merged(*folders: Path) -> list[dict[str, Any]]:
    return merge([Source(folder, read_record(folder)) for folder in folders])


def lines_of(folder: Path, rate: float, backend: str = "fi") -> list[dict[str, Any]]:
    return read_requests(folder, [(backend, rate)])[backend, rate]


def test_calls_become_one_section(call: Call, tmp_path: Path) -> None:
    folders = [
        call("a", "--backend", "fi"),
        call("b", "--backend", "TRITON"),
        call("c", "--backend", "fi", "--seed", "1", rates="40,60"),
        call("d", "--backend", "fi", "--workload", "uniform:in=30,out=4"),
    ]
    together, alone = merged(*folders)
    assert alone == read_record(folders[3])
    ours, theirs = together["backends"]
    assert (ours["name"], theirs["name"]) == ("fi", "TRITON")
    assert theirs == read_record(folders[1])["backends"][0]
    assert [(row["rate"], row["requests"], row["runs"]) for row in ours["points"]] == [
        *((20, 20, 2), (40, 40, 4), (60, 20, 2))
    ]
    assert ours["sustained"] == {"rate": 60, "failed": None, "how": "2 records"}
    assert [part["settings"]["seed"] for part in together["parts"]] == [0, 0, 1]

    page = tmp_path / "all.html"
    result = RUN.invoke(app, ["bench", "report", *map(str, folders), "--out", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.count("<section>") == 2
    assert "40 in 4" in text
    assert all(str(folder) in text for folder in folders[:3])


def test_requests_are_pooled_over_seeds(call: Call) -> None:
    """Percentiles and bounds are those of all raw requests, in runs of their own."""
    folders = [call(f"seed{seed}", "--backend", "fi", "--seed", str(seed)) for seed in range(3)]
    [record] = merged(*folders)
    row = next(row for row in record["backends"][0]["points"] if row["rate"] == 40)
    runs = [
        [[line["piece_ms"][0][0]] for line in lines_of(folder, 40) if line["run"] == run]
        for folder in folders
        for run in range(2)
    ]
    firsts = [value for run in runs for [value] in run]
    assert len(firsts) == 60 == row["requests"]
    wanted = percentile_bounds(runs, (50, 90, 99))
    for percent, bounded in zip((50, 90, 99), wanted, strict=True):
        value, low, high = row["ttft_ms"][f"p{percent}"]
        assert value == pytest.approx(np.percentile(firsts, percent), abs=0.002)
        assert (low, high) == pytest.approx((bounded.low, bounded.high), abs=0.002)
    single = [read_record(folder)["backends"][0]["points"][1] for folder in folders]
    assert len({each["ttft_ms"]["p99"][0] for each in single}) == 3
    assert row["seconds"] == sum(each["seconds"] for each in single)
    assert row["kv_bytes"]["flat"] == sum(each["kv_bytes"]["flat"] for each in single)
    assert row["fi"].keys() == single[0]["fi"].keys()
    assert row["loop_lag_ms"] == max((each["loop_lag_ms"] for each in single), key=lambda each: each["p99"])


def test_a_row_comes_back_from_its_requests(call: Call) -> None:
    folder = call("one", "--backend", "fi")
    row = read_record(folder)["backends"][0]["points"][0]
    again = pool(20, [Part(row, lines_of(folder, 20))], OBJECTIVES)
    assert again.keys() == row.keys()
    for name in (
        "requests",
        "runs",
        "completed",
        "errors",
        "holds",
        "goodput_per_s",
        "offered_rate",
        "lag_ms",
    ):
        assert again[name] == row[name], name
    for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
        for percent, triple in row[metric].items():
            assert again[metric][percent] == pytest.approx(triple, abs=0.002)


def test_what_was_given_up_keeps_the_time_it_had_waited(call: Call) -> None:
    search = ("--start-rate", "0.25", "--max-rate", "0.25", "--backend", "fi", "--slo-ttft-p99", "60s")
    folders = [call(name, *search, "--seed", name, rates="") for name in ("0", "1")]
    [record] = merged(*folders)
    [row] = record["backends"][0]["points"]
    assert (row["stopped_early"], row["holds"]) == (True, False)
    assert row["ttft_ms"]["p99"][0] == 1500
    assert record["backends"][0]["sustained"]["failed"] == 0.25

    path = folders[1] / REQUESTS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line | {"stopped_ms": 0}) + "\n" for line in lines))
    [record] = merged(*folders)
    [row] = record["backends"][0]["points"]
    assert row["ttft_ms"]["p50"][0] < 1500
    for line in lines:
        del line["stopped_ms"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"fi at [\d.]+/s, pooled from .*: expected stopped_ms"):
        merged(*folders)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "12"), "settings: requests 12 instead of 10"),
        (("--max-len", "512"), "settings: max_len 512 instead of 8192"),
        (("--slo-itl-p99", "1s"), "objectives [{'metric': 'ttft_ms'"),
        (("--", "--block-size=32"), "settings: server_arguments ['--block-size=32'] instead of []"),
    ],
)
def test_other_settings_are_refused(
    call: Call, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "TRITON", *arguments)
    page = tmp_path / "no.html"
    result = RUN.invoke(app, ["bench", "report", str(one), str(two), "--out", str(page)])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert words in said
    assert not page.exists()
    with pytest.raises(ValueError, match="the same; got") as caught:
        merged(one, two)
    assert str(caught.value).startswith(f"{two}: expected what {one} has")


@pytest.mark.parametrize("field", ["host", "versions"])
def test_other_machines_are_refused(call: Call, field: str) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "TRITON")
    changed = read_record(two)
    changed[field] = {"host": "another", "versions": changed["versions"] | {"torch": "0"}}[field]
    write_record(two, changed)
    with pytest.raises(ValueError, match=rf"got {field}.* instead of"):
        merged(one, two)


def test_the_same_requests_do_not_count_twice(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", rates="40,60")
    with pytest.raises(ValueError, match="got fi at 40/s with seed 0 in both"):
        merged(one, two)
    with pytest.raises(ValueError, match="got fi at 20/s with seed 0 in both"):
        merged(one, one)
    three = call("three", "--backend", "fi", rates="60")
    assert len(merged(one, three)[0]["backends"][0]["points"]) == 3


def test_missing_requests_are_named(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", "--seed", "5")
    path = two / REQUESTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"fi at 20/s, pooled from .*: expected 20 requests; .* has 19"):
        merged(one, two)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1: expected a request"):
        merged(one, two)
    path.unlink()
    with pytest.raises(ValueError, match=r"requests\.jsonl: expected the requests of the record beside it"):
        merged(one, two)


def test_of_runs_that_failed_only_interrupted_ones_are_pooled(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", "--seed", "5")
    for interrupted, requests in ((True, 40), (False, 20)):
        changed = read_record(two)
        changed["backends"][0] |= {"failed": "it <stopped>", "interrupted": interrupted, "sustained": None}
        write_record(two, changed)
        [record] = merged(one, two)
        [entry] = record["backends"]
        assert {row["requests"] for row in entry["points"]} == {requests}
        assert entry["failed"] == f"{two}: it <stopped>"
        assert entry["sustained"]["rate"] == 40


def test_what_was_compiled_late_is_not_pooled_though_interrupted(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", "--seed", "5")
    changed = read_record(two)
    changed["backends"][0] |= {"failed": "interrupted; a module was compiled", "interrupted": True}
    changed["backends"][0]["builds"]["after_ready"] = ["cpu_attention"]
    write_record(two, changed)
    [entry] = merged(one, two)[0]["backends"]
    assert {row["requests"] for row in entry["points"]} == {20}
    assert entry["builds"]["after_ready"] == ["cpu_attention"]


def test_a_run_that_failed_may_be_repeated_with_its_seed(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi")
    changed = read_record(one)
    changed["backends"][0] |= {"failed": "a server died", "interrupted": False}
    write_record(one, changed)
    [entry] = merged(one, two)[0]["backends"]
    assert [row["requests"] for row in entry["points"]] == [20, 20]
    assert entry["failed"] == f"{one}: a server died"


def test_damaged_requests_are_named(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", "--seed", "5")
    path = two / REQUESTS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines) + lines[0][:30])  # killed while it wrote; nobody wants that rate
    assert {row["requests"] for row in merged(one, two)[0]["backends"][0]["points"]} == {40}
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    with pytest.raises(ValueError, match=r"fi at 40/s, pooled from .*: expected 20 requests; .* has 19"):
        merged(one, two)
    first = json.loads(lines[0])
    for damaged, words in (
        (b"\xff\n", r"requests\.jsonl, line 1: expected a request; UnicodeDecodeError"),
        (b'{"backend": [], "rate": 20}\n', r"requests\.jsonl, line 1: expected a request; TypeError"),
        (json.dumps(first | {"piece_ms": None}).encode() + b"\n", r"fi at 20/s, .*TypeError"),
        (json.dumps({k: v for k, v in first.items() if k != "run"}).encode() + b"\n", r"fi at 20/s, .*'run'"),
    ):
        path.write_bytes(damaged + b"".join(lines[1:]))
        with pytest.raises(ValueError, match=words):
            merged(one, two)


def test_counters_that_one_version_lacks_are_left_out(call: Call) -> None:
    one, two = call("one", "--backend", "fi"), call("two", "--backend", "fi", "--seed", "5")
    changed = read_record(two)
    for row in changed["backends"][0]["points"]:
        del row["fi"]["tokens"]
    write_record(two, changed)
    for row in merged(one, two)[0]["backends"][0]["points"]:
        assert "tokens" not in row["fi"]
        assert "steps" in row["fi"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", ","), "--backend: expected each back end once; got none"),
        (("--rates", "4,8,4.0"), "--rates: expected each rate once; got 4.0 twice in '4,8,4.0'"),
        (("--backend", "fi,X,fi"), "--backend: expected each back end once; got fi, X, fi"),
    ],
)
def test_nothing_is_measured_twice_in_one_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = bench(monkeypatch, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
