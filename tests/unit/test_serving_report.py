# SPDX-License-Identifier: Apache-2.0
"""The report: complete, self-contained, well-formed HTML; and really drawn, where a browser is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from serving_records import STEP, record, row
from typer.testing import CliRunner

from fi_backend.benchmarks.serving.charts import Point, Series, bar_chart, line_chart
from fi_backend.benchmarks.serving.records import FORMAT, read_record, write_record
from fi_backend.benchmarks.serving.report import render
from fi_backend.cli.main import app

RUN = CliRunner()
VOID = {"meta"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """Tags with their attributes, text, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", [""]
        self.feed(text)
        assert self._open == [""]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, part: str = "") -> int:
        return sum(name == tag and part in (attrs.get("class") or "") for name, attrs in self.tags)


def test_the_report_shows_all_that_was_measured() -> None:
    page = Page(render([record()]))
    for caption in (
        "Time to first token",
        "Time between tokens",
        "Goodput",
        "KV bytes read while decoding, fi",
        "Balance over 132 CTAs in sampled steps, fi",
    ):
        assert caption in page.text
    assert page.count("svg", "chart") == 5
    assert page.count("path", "limit") == 1
    assert "objective: P99 ≤ 200 ms" in page.text
    assert page.count("path", "bound") == 2 * 2 * 2 * 3  # charts, back ends, percentiles, rates
    assert "A&B <x>" in page.text
    assert "480 [384, 624]" in page.text
    assert "stopped early" in page.text
    assert (page.count("th"), page.count("td")) == (6 + 13, 2 * 6 + 6 * 13)  # back ends; their rates


def test_captions_say_what_is_counted_and_how_steps_were_planned() -> None:
    """Records of before sharing was planned say nothing of it: their steps were planned flat."""
    text = Page(render([record()])).text
    assert "K and V of all layers that decoding reads when every sample reads its own" in text
    assert "less what the back end's counters say its steps did not read again" in text
    assert "planned flat, as every request read its own KV" in text
    shared = record()
    rows = shared["backends"][0]["points"]
    rows[0]["balance"] = {"num_ctas": 132, "shared": True, "steps": [{**STEP, "prefix_nodes": 3}]}
    text = Page(render([shared])).text
    assert "prefixes read together at the rates at which the run did" in text
    assert "1.07: 9 requests, 900 KV tokens, 3 shared prefixes" in text
    for each in rows:
        each["balance"] = rows[0]["balance"]
    assert "prefixes read together, as the run did" in Page(render([shared])).text


def test_kv_bytes_are_those_of_a_request() -> None:
    """Pooled rates have more requests, and bars that stood higher for that would compare nothing."""
    one, pooled = record(), record()
    pooled["backends"][0]["points"][0] |= {"requests": 1200, "kv_bytes": {"flat": 64e9, "saved": 48e9}}
    notes = "8/s without sharing: 53.33 MB", "8/s with sharing: 13.33 MB"
    for each in (one, pooled):
        text = Page(render([each])).text
        assert all(note in text for note in notes)


def test_a_back_end_that_never_failed_may_be_better() -> None:
    best, unknown = record(), record()
    for each, failed in ((best, 6.0), (unknown, None)):
        each["backends"][1]["sustained"] = {"rate": 4.0, "failed": failed, "how": "grid"}
    assert "≥" not in Page(render([best])).text.replace("≤", "")
    assert "≥ 0.50" in Page(render([unknown])).text


def test_compilations_of_the_start_stand_beside_it() -> None:
    cold = record()
    cold["backends"][0]["builds"] = {"before_ready": 4, "after_ready": []}
    page = Page(render([cold]))
    assert page.text.count("31.5 s, 4 compiled") == 1
    assert page.text.count("31.5 s") == 2


def test_the_report_needs_nothing_else() -> None:
    text = render([record()])
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"}
    assert not [name for _, attrs in page.tags for name in attrs if name in ("src", "href", "srcset", "data")]
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_what_was_not_measured_leaves_a_report() -> None:
    empty = record()
    empty["backends"][0] |= {"points": [], "sustained": None, "ready_s": None, "failed": "it <died>"}
    empty["backends"][1]["points"] = [row(4, None, ours=False) | {"lag_ms": None}]
    page = Page(render([empty, record(objectives=[])]))
    assert "it <died>" in page.text
    assert "nothing measured" in page.text
    assert page.count("section") == 2


def test_points_lie_where_their_values_are() -> None:
    """On a scale of logarithms the middle of 10 and 1000 is 100."""
    points = tuple(Point(index, value) for index, value in enumerate((10, 100, 1000), 1))
    page = Page(line_chart([Series("a", points, 0)], x_label="x", y_label="y", log=True))
    ys = [float(attrs["cy"] or 0) for tag, attrs in page.tags if tag == "circle"]
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.2)
    page = Page(bar_chart([("a", [(0, 1.0, "one"), (1, 2.0, "two")])], y_label="y"))
    heights = [float(attrs["height"] or 0) for tag, attrs in page.tags if tag == "rect"]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)


def test_records_come_back_and_are_checked(tmp_path: Path) -> None:
    write_record(tmp_path, record())
    assert read_record(tmp_path) == record()
    for text, words in (
        ("{}", "format: expected 'fi_backend serving 1'; got None"),
        ("[]", "got 'list'"),
        ("{", "expected JSON"),
        (json.dumps({"format": FORMAT}), "expected a field engine"),
    ):
        (tmp_path / "record.json").write_text(text)
        with pytest.raises(ValueError, match=r"record\.json: ") as caught:
            read_record(tmp_path)
        assert words in str(caught.value)
    lacking = record()
    del lacking["backends"][1]["points"][2]["lag_ms"]
    write_record(tmp_path, lacking)
    with pytest.raises(ValueError, match="A&B <x>: a row lacks lag_ms"):
        read_record(tmp_path)


def test_a_report_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_record(tmp_path, record())
    result = RUN.invoke(app, ["bench", "report", str(tmp_path), "--out", str(tmp_path / "no" / "page.html")])
    assert result.exit_code == 2
    assert "--out: expected a file that can be written" in " ".join(result.stderr.split())


def test_several_records_become_one_report(tmp_path: Path) -> None:
    folders = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_record(tmp_path / name, record(workload=f"trace {name}"))
        folders.append(str(tmp_path / name))
    result = RUN.invoke(app, ["bench", "report", *folders, "--out", str(tmp_path / "all.html")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "all.html").read_text()
    assert "trace one" in text
    assert "trace two" in text
    result = RUN.invoke(app, ["bench", "report", str(tmp_path / "three"), "--out", str(tmp_path / "no.html")])
    assert result.exit_code == 2
    assert "expected a serving record" in result.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """Lines, limit and bars are seen in a picture of the page: their colours are there."""
    matplotlib_image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    page.write_text(render([record()]))
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"),
        # A container has little shared memory, and a desktop may have a scale of its own.
        *("--disable-dev-shm-usage", "--force-device-scale-factor=1"),
    )
    assert BROWSER is not None
    subprocess.run(
        [
            *(BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1300,1500"),
            *(f"--screenshot={picture}", page.as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=600,
    )
    pixels = (matplotlib_image.imread(picture)[..., :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (1500, 1300)
    for colour in ("#0072b2", "#d55e00", "#009e73", "#b3261e"):
        wanted = np.array([int(colour[index : index + 2], 16) for index in (1, 3, 5)])
        assert (np.abs(pixels - wanted).max(-1) < 8).sum() > 60, colour
    # Two columns of figures: both halves hold ink well below the tables.
    ink = (pixels < 200).any(-1)
    assert ink[500:1200, :650].mean() > 0.01
    assert ink[500:1200, 650:].mean() > 0.01
