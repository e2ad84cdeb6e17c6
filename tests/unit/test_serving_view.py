# SPDX-License-Identifier: Apache-2.0
"""The live table, the balance of sampled steps, and doctor's request with a known answer."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fi_backend.benchmarks.serving import known_answer
from fi_backend.benchmarks.serving.client import LoadRun
from fi_backend.benchmarks.serving.known_answer import Served
from fi_backend.benchmarks.serving.model import ServedModel, prepare_model
from fi_backend.benchmarks.serving.protocols import Outcome, Request
from fi_backend.benchmarks.serving.summary import Measured, Objective, summarize
from fi_backend.cli import serve_options, serve_view
from fi_backend.cli.main import app
from fi_backend.cli.serve_balance import Decoding, balance_of, block_table, sampled_batches

RUN = CliRunner()
MODEL = ServedModel("m", "m", True, 512, layers=2, heads=4, kv_heads=2, head_dim=64)


def run_of(spans: list[tuple[float, int, int]]) -> Measured:
    """Requests with (arrival, prompt tokens, answer tokens); a token every 0.1 s from 0.1 s after arrival."""
    requests, outcomes = [], []
    for at, prompt, answer in spans:
        outcome = Outcome(sent=0.0)
        for index in range(answer):
            outcome.take(0, [1], 0.1 + 0.1 * index)
        outcome.ended = 1
        requests.append(Request([1] * prompt, answer, at=at))
        outcomes.append(outcome)
    return Measured(requests, LoadRun(outcomes, 10.0))


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=150, highlight=False)
    monkeypatch.setattr(serve_view, "console", lambda: console)
    run = run_of([(0.0, 10, 5), (0.1, 10, 5)])
    with serve_view.ServeView() as view:
        view.starting("fi", 3.0, "loading weights")
        view.loading("fi", 4.0, 0, run.load, 1.0)
        view.measured("fi", summarize(4.0, [run], [Objective("ttft_ms", 99, 200.0)]))
        view.measured("X", summarize(8.0, [run], [Objective("ttft_ms", 99, 50.0)]))
    shown = screen.getvalue()
    for text in ("fi", "X", "100 (100..100)", "yes", "no"):
        assert text in shown
    for text in ("fi at 4/s: holds; 2 requests", "loading weights"):
        assert terminal or text in shown


def test_a_batch_is_what_decodes_at_a_moment() -> None:
    """From 0.1 to 1.0 s the first decodes, from 1.05 to 1.45 s the second, alone."""
    batches = sampled_batches([run_of([(0.0, 100, 10), (0.95, 50, 5)])], moments=6)
    # At 0.3, 0.4, 0.6, 0.8, 1.05 and 1.15 s: even steps through the 13 tokens that others follow.
    assert [[each.kv_len for each in batch] for batch in batches] == [[103], [104], [106], [108], [51], [52]]
    assert [batch[0].request for batch in batches] == [0, 0, 0, 0, 1, 1]
    assert sampled_batches([run_of([(0.0, 100, 1)])], moments=6) == []


def test_balance_of_equal_and_of_few_requests() -> None:
    examine = balance_of(MODEL, cpu=False, num_ctas=8)
    even = examine([run_of([(0.0, 4000, 20)] * 16)], False)["balance"]
    assert even["num_ctas"] == 8
    assert len(even["steps"]) == 8
    assert all(step["requests"] == 16 and 1 <= step["max_over_mean"] < 1.3 for step in even["steps"])
    assert (even["shared"], {step["prefix_nodes"] for step in even["steps"]}) == (False, {0})
    assert examine([run_of([(0.0, 5, 1)])], False) == {}
    unknown = ServedModel("m", "m", True, 512)
    assert balance_of(unknown, cpu=False, num_ctas=8)([run_of([(0.0, 4000, 20)])], False) == {}


def test_pages_are_equal_where_tokens_are() -> None:
    """Pages of 4: two requests have the same blocks of 6 and 5 tokens, a third the first block alone."""
    blocks = ((7, 6), (8, 5))
    requests = [
        Request([1] * 14, 9, prefix=blocks, samples=2),
        Request([1] * 12, 9, prefix=blocks),
        Request([1] * 20, 9, prefix=((7, 6), (9, 11))),
    ]
    lens = [(0, 17), (0, 15), (1, 13), (2, 21)]
    table = block_table(requests, [Decoding(*each) for each in lens], page_size=4).tolist()
    first, sibling, second, third = table
    # 6 + 5 shared tokens are two pages; the samples of a request have its third page in common, too.
    assert first[:3] == sibling[:3]
    assert first[:2] == second[:2]
    assert first[0] == third[0]
    own = [first[3:5], sibling[3:4], second[2:4], third[1:6]]
    pages = [*first[:3], *(page for row in own for page in row)]
    assert len(set(pages)) == len(pages) == 3 + 2 + 1 + 2 + 5


def test_the_plan_shares_where_the_run_did() -> None:
    """Behind 16000 tokens of all, a CTA has little of its own to do and one node is read for all samples."""
    run = run_of([(0.0, 16500, 20)] * 16)
    run.requests = [replace(request, prefix=((3, 16000),)) for request in run.requests]
    examine = balance_of(MODEL, cpu=False, num_ctas=8)
    flat, shared = (examine([run], sharing)["balance"] for sharing in (False, True))
    assert {step["prefix_nodes"] for step in flat["steps"]} == {0}
    assert {step["prefix_nodes"] for step in shared["steps"]} == {1}
    assert (flat["shared"], shared["shared"]) == (False, True)
    assert [step["kv_tokens"] for step in flat["steps"]] == [step["kv_tokens"] for step in shared["steps"]]
    assert all(1 <= step["max_over_mean"] < 1.5 for step in shared["steps"])


def test_parallel_samples_share_their_prompt() -> None:
    run = run_of([(0.0, 16000, 20)])
    run.requests = [replace(run.requests[0], samples=8)]
    outcome = Outcome(8, sent=0.0)
    for sample in range(8):
        for index in range(20):
            outcome.take(sample, [1], 0.1 + 0.1 * index)
    run.load.outcomes = [outcome]
    steps = balance_of(MODEL, cpu=False, num_ctas=8)([run], True)["balance"]["steps"]
    assert {(step["requests"], step["prefix_nodes"]) for step in steps} == {(8, 1)}


def test_models(tmp_path: Any) -> None:
    made = prepare_model("dummy:tiny", tmp_path)
    assert (made.dummy, made.layers, made.heads, made.kv_heads, made.head_dim) == (True, 2, 4, 2, 64)
    assert made.kv_bytes_per_token() == 2 * 2 * 2 * 64 * 2
    again = prepare_model(made.name, tmp_path / "other")
    assert (again.name, again.dummy, again.vocabulary) == (made.name, False, 512)
    hub = prepare_model("someone/something", tmp_path)
    assert (hub.name, hub.kv_bytes_per_token()) == ("someone/something", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="model: expected a folder with config"):
        prepare_model(str(tmp_path / "empty"), tmp_path)


@pytest.mark.parametrize(
    ("served", "status", "words"),
    [
        (Served("vllm", True, "back end fi served 9 calls; answer correct", 20.0, 0.5), 0, "answer in 0.5 s"),
        (
            Served("vllm", False, "answer wrong: expected 'a'", 20.0, 0.5),
            1,
            "problem: vllm did not serve the",
        ),
    ],
)
def test_doctor_serves(monkeypatch: pytest.MonkeyPatch, served: Served, status: int, words: str) -> None:
    asked: list[Any] = []
    module = sys.modules["fi_backend.cli.doctor"]
    found = module.examine()
    monkeypatch.setattr(module, "examine", lambda: found)
    monkeypatch.setattr(serve_options, "check_engine", lambda *_, **__: None)
    monkeypatch.setattr(
        known_answer, "serve_known_answer", lambda *a, **k: asked.append((a, k["cpu"])) or served
    )
    if not found.usable:
        pytest.skip(f"nothing can be served here: {found.problems}")
    result = RUN.invoke(app, ["doctor", "--engine", "vllm", "--device", "cpu"])
    assert result.exit_code == status
    assert words in result.stdout
    assert asked == [(("vllm",), True)]
    document = json.loads(RUN.invoke(app, ["doctor", "--engine", "vllm", "--device", "cpu", "--json"]).stdout)
    assert document["served"]["detail"] == served.detail
    assert document["usable"] is served.ok


def test_doctor_names_an_engine_that_it_cannot_start() -> None:
    result = RUN.invoke(app, ["doctor", "--engine", "tgi"])
    assert result.exit_code == 2
    assert "--engine: expected vllm or sglang; got 'tgi'" in result.stderr


def test_the_known_answer_stands_far_back() -> None:
    prompt, answer = known_answer.prompt_with_answer()
    assert prompt.count(known_answer.CUE) == 2
    assert prompt.index(answer) < len(prompt) - 1000
    assert np.unique(list(answer.encode())).size > 20
