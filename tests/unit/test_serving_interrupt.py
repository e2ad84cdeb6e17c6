# SPDX-License-Identifier: Apache-2.0
"""`bench serve` ended from outside: what was measured is in record and report, and no engine stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
from aiohttp import web
from serving_bench import bench
from serving_fake import FakeServer

from fi_backend.benchmarks.serving import model
from fi_backend.benchmarks.serving.records import read_record
from fi_backend.cli.serve_interrupt import Interrupted, interruptible

FIRST_RATE = 2 + 2 * 11  # requests: the warm-up, two runs of ten behind one that waits for quiet


class Interrupting(FakeServer):
    """Sends this process a signal when the first request of the second rate comes."""

    number = signal.SIGTERM
    report = Path()
    reports: list[str]
    stopped: list[bool]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if len(self.bodies) == FIRST_RATE and not self.reports:
            self.reports.append(self.report.read_text())
            os.kill(os.getpid(), self.number)
        return await super()._completions(request)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.stopped.append(True)


@pytest.fixture(autouse=True)
def _hangup_is_not_ignored() -> Iterator[None]:
    """Where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_has_its_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    reports: list[str] = []
    stopped: list[bool] = []
    result = bench(
        monkeypatch,
        tmp_path,
        *("--backend", "fi,TRITON", "--rates", "20,40"),
        server=Interrupting,
        number=number,
        report=tmp_path / "report.html",
        reports=reports,
        stopped=stopped,
    )
    assert result.exit_code == 128 + number
    assert stopped == [True]
    [entry] = read_record(tmp_path)["backends"]
    assert (entry["name"], entry["interrupted"]) == ("fi", True)
    assert entry["failed"] == "interrupted; complete rates: 1"
    assert [row["rate"] for row in entry["points"]] == [20]
    assert entry["sustained"] == {"rate": 20, "failed": None, "how": "so far"}
    page = (tmp_path / "report.html").read_text()
    assert "interrupted; complete rates: 1" in page
    assert "interrupted; complete rates: 1" in result.stdout
    # The report was there before the signal, too: nothing can be caught of SIGKILL.
    assert len(reports) == 1
    assert reports[0].count("<circle") == page.count("<circle") > 0
    assert signal.getsignal(number) == before


def test_a_signal_before_the_engine_starts_is_an_end_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While the model is made: there is no record yet, and nothing is called a report."""

    def prepare(_model: str, _folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(model, "prepare_model", prepare)
    result = bench(monkeypatch, tmp_path / "out", "--backend", "fi", "--rates", "20")
    assert result.exit_code == 143
    assert "report" not in result.stdout
    assert list((tmp_path / "out").iterdir()) == []


def test_a_second_signal_does_not_disturb_the_end() -> None:
    ended = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(os.getpid(), number)
            ended.append(True)

    with pytest.raises(Interrupted) as caught, interruptible():
        work()
    assert ended == [True]
    assert caught.value.exit_code == 143


def test_a_hangup_under_nohup_is_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
