# SPDX-License-Identifier: Apache-2.0
"""Workloads of the serving benchmark: rates, shapes, windows, shared tokens, and mistakes by name."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fi_backend.benchmarks.serving.arrivals import Arrival, arrival_times, at_rate
from fi_backend.benchmarks.serving.prompts import Prompts
from fi_backend.benchmarks.serving.trace_files import read_trace
from fi_backend.benchmarks.serving.workload import parse_workload, prefix_paths

AZURE = Path(__file__).resolve().parents[2] / "benchmarks" / "serving" / "azure2023-conv-90s.jsonl"


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_rate_stretches_the_gaps_and_keeps_their_proportions() -> None:
    made = at_rate([Arrival(at, 1, 1) for at in (3.0, 4.0, 4.5, 9.0)], 2.0)
    assert [each.at for each in made] == pytest.approx([0, 0.25, 0.375, 1.5])


@pytest.mark.parametrize("times", [[0.0], [2.0, 2.0]])
def test_arrivals_without_a_span_are_spaced_evenly(times: list[float]) -> None:
    made = at_rate([Arrival(at, 1, 1) for at in times], 4.0)
    assert [each.at for each in made] == [0.25 * index for index in range(len(times))]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_variation_asked_for(cv: float) -> None:
    gaps = np.diff(arrival_times(200_000, cv, np.random.default_rng(1)))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_share_gpt_lengths_have_its_means() -> None:
    made = parse_workload("sharegpt", max_len=1 << 20).arrivals(1, 50_000, seed=0, run=0)
    assert np.mean([each.prompt for each in made]) == pytest.approx(230, rel=0.05)
    assert np.mean([each.answer for each in made]) == pytest.approx(203, rel=0.05)


@pytest.mark.parametrize(
    "text", ["sharegpt", "bursty:cv=3", "uniform:in=10,out=20,cv=0", "shared-prefix", str(AZURE)]
)
def test_equal_seeds_give_equal_requests_and_runs_differ(text: str) -> None:
    workload = parse_workload(text, max_len=8192)
    first = workload.arrivals(4, 50, seed=7, run=0)
    assert first == workload.arrivals(4, 50, seed=7, run=0)
    assert len(first) == 50
    assert 49 / (first[-1].at - first[0].at) == pytest.approx(4)
    assert all(late.at >= early.at for early, late in pairwise(first))
    assert all(each.answer >= 1 and each.prompt + each.answer <= 8192 for each in first)
    if "cv=0" not in text:
        assert first != workload.arrivals(4, 50, seed=7, run=1)


def test_another_rate_asks_for_the_same_at_other_times() -> None:
    workload = parse_workload("sharegpt", max_len=4096)
    slow, fast = (workload.arrivals(rate, 20, seed=0, run=0) for rate in (2, 8))
    assert [(each.prompt, each.answer) for each in slow] == [(each.prompt, each.answer) for each in fast]
    assert [each.at for each in slow] == pytest.approx([4 * each.at for each in fast])


def test_a_tree_of_three_levels() -> None:
    paths = prefix_paths([(100, 1), (10, 2), (5, 3)])
    assert len(paths) == 6
    assert {path[0] for path in paths} == {(0, 100)}
    assert [tokens for _, tokens in paths[0]] == [100, 10, 5]
    assert len({path[1] for path in paths}) == 2
    assert len({path[2] for path in paths}) == 6
    workload = parse_workload("shared-prefix:levels=100/10*2/5*3,own=7,out=9,n=4", max_len=200)
    made = workload.arrivals(1, 100, seed=0, run=0)
    assert {(each.prompt, each.answer, each.samples) for each in made} == {(122, 9, 4)}
    assert {each.prefix for each in made} == set(workload.primers) == set(paths)


def test_prompts_share_what_their_prefixes_share_and_nothing_else() -> None:
    prompts = Prompts(1000, [1, 2])
    a = prompts.prompt(Arrival(0, 40, 1, ((0, 16), (1, 16))), 0)
    b = prompts.prompt(Arrival(0, 40, 1, ((0, 16), (2, 16))), 1)
    assert (len(a), len(b)) == (40, 40)
    assert a[:16] == b[:16] == prompts.prefix([(0, 16)])
    assert a[16:32] != b[16:32]
    assert a[32:] != b[32:]
    assert Prompts(1000, [1, 3]).prefix([(0, 16)]) != a[:16]
    assert max(max(a), max(b)) < 700  # the last ids are special tokens
    assert prompts.prompt(Arrival(0, 20, 1, ((0, 16), (1, 16))), 5) == a[:20]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_the_spellings_of_a_trace(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, object]] = [
        {"t_ms": 2500, "in": 1100, "out": 3, "runs": [[0, 1], [7, 2]]},
        {"timestamp": 500, "input_length": 600, "output_length": 0, "hash_ids": [0, 9]},
        {"t_ms": 900, "in": 9000, "out": 1},
    ]
    made = read_trace(write(tmp_path / f"trace{suffix}", rows), max_len=8192)
    assert made == [
        Arrival(0.0, 600, 1, ((0, 512), (9, 512))),
        Arrival(2.0, 1100, 3, ((0, 512), (7, 512), (8, 512))),
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"t_ms": 1, "in": 1}, "line 2: expected a field out or output_length; got t_ms, in"),
        ({"t_ms": 1, "in": 0, "out": 1}, "line 2: expected in >= 1 and out >= 0; got 0 and 1"),
        ({"t_ms": "x", "in": 1, "out": 1}, "line 2: could not convert"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, object], words: str) -> None:
    path = write(tmp_path / "bad.jsonl", [{"t_ms": 0, "in": 1, "out": 1}, row])
    with pytest.raises(ValueError, match=words):
        read_trace(path)


def test_a_trace_of_long_requests_alone_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "long.jsonl", [{"t_ms": 0, "in": 100, "out": 1}])
    with pytest.raises(ValueError, match="at most 50 tokens; got none among 1"):
        parse_workload(str(path), max_len=50)


def test_a_trace_shorter_than_asked_gives_what_it_has(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"t_ms": 10 * index, "in": 5, "out": 1} for index in range(4)]
    workload = parse_workload(f"{write(tmp_path / 't.jsonl', rows)}:n=2", max_len=50)
    made = workload.arrivals(2, 100, seed=0, run=0)
    assert [each.at for each in made] == pytest.approx([0, 0.5, 1, 1.5])
    assert {each.samples for each in made} == {2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "expected sharegpt, uniform, bursty, shared-prefix or the path"),
        ("sharegpt:in=3", "sharegpt has no option in"),
        ("uniform:in=0", "in: expected a number >= 1; got '0'"),
        ("uniform:in=x", "in: expected a number >= 1; got 'x'"),
        ("uniform:in=90,out=20", "at most 100 tokens together; got 110. Raise --max-len"),
        ("bursty:cv=-1", "cv: expected a number >= 0"),
        ("shared-prefix:levels=10/0*2", "expected TOKENS or TOKENS"),
        ("shared-prefix:levels=90,own=20,out=1", "got 111"),
        ("uniform:n=0", "n: expected a number >= 1"),
    ],
)
def test_a_mistake_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_workload(text, max_len=100)
