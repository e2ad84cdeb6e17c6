# SPDX-License-Identifier: Apache-2.0
"""Steps of vLLM that are saved when someone asks, and drawn."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_step import make_builder, make_common, make_layer, roomy_config, shared_step

from fi_backend.adapters import step_capture
from fi_backend.cli.explain_model import explain_step
from fi_backend.cli.main import app
from fi_backend.core import counters as counters_module
from fi_backend.core.counters import Counters, ask_for_steps
from fi_backend.core.planner import CostModel
from fi_backend.core.step import load_step

LOG = "vllm.plugins.fi_backend"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    config = roomy_config(monkeypatch)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return config


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Counters:
    made = Counters(tmp_path)
    monkeypatch.setattr(counters_module, "_current", made)
    return made


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_the_next_steps_are_saved_and_drawn(config: Any, counts: Counters, tmp_path: Path) -> None:
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    common = shared_step(q_len=2)
    builder.build(0, common)
    assert files(tmp_path) == [], "nobody has asked"
    [asked] = ask_for_steps(tmp_path, 2)
    builder.build_for_cudagraph_capture(common)
    for _ in range(3):
        builder.build(0, common)
    found = files(tmp_path)
    assert [path.name.rsplit(".", 3)[1] for path in found] == ["step1", "step2"]
    assert sorted(tmp_path.glob(asked.files)) == found
    assert counts.snapshot().step_files == 2

    step = load_step(found[0])
    (attention,) = builder.attention.values()
    assert step.qo_indptr.tolist() == common.query_start_loc.tolist()
    assert step.kv_lens.tolist() == common.seq_lens.tolist()
    for row, pages, count in zip(common.block_table_tensor, step.block_table, step.num_pages, strict=True):
        assert pages == row[:count].tolist()
    assert (step.num_ctas, step.device, step.tiles) == (attention.num_ctas, "cpu", (1, 128))

    costs = CostModel.for_device("cpu")
    tree = explain_step(step, num_ctas=step.num_ctas, costs=costs).tree
    saved = counts.snapshot().kv_tokens_saved // 4  # of four steps, and none of the capture
    assert tree.flat_reads - tree.composed_reads == saved > 0
    shown = CliRunner().invoke(app, ["explain", "--step", str(found[0]), "--prefix"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "● 12 requests × 1920 tokens" in shown.stdout


def test_every_kind_of_layer_saves_its_own(config: Any, counts: Counters, tmp_path: Path) -> None:
    make_layer(config, "global")
    make_layer(config, "local", sliding_window=64)
    builder = make_builder(config, ["global", "local"])
    ask_for_steps(tmp_path, 1)
    builder.build(0, shared_step())
    ask_for_steps(tmp_path, 1)
    builder.build(0, make_common([1, 3], [20, 40]))
    steps = [load_step(path) for path in files(tmp_path)]
    assert [len(step.kv_lens) for step in steps] == [12, 12, 2, 2]
    assert sorted(step.window_left for step in steps) == [-1, -1, 63, 63]
    assert len({path.name.rsplit(".", 2)[1] for path in files(tmp_path)}) == 2, "two plans, two names"


def test_padding_is_left_out(config: Any, counts: Counters, tmp_path: Path) -> None:
    """Of steps that a graph serves: requests without queries and keys."""
    make_layer(config, "layer")
    ask_for_steps(tmp_path, 1)
    common = make_common([1, 2, 0, 0], [20, 40, 0, 0])
    common.block_table_tensor[2:] = -1
    make_builder(config, ["layer"]).build(0, common)
    [path] = files(tmp_path)
    assert load_step(path).kv_lens.tolist() == [20, 40]


def test_nothing_is_saved_while_a_graph_is_captured(
    config: Any, counts: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    ask_for_steps(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(step_capture, "may_wait", lambda _: False)
        builder.build(0, shared_step())
    assert files(tmp_path) == []
    builder.build(0, shared_step())
    assert len(files(tmp_path)) == 1


def test_what_cannot_be_saved_stops_nothing(
    config: Any, counts: Counters, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    ask_for_steps(tmp_path, 2)
    common = make_common([1, 1], [20, 40])
    common.block_table_tensor[1, 2] = -5
    with caplog.at_level(logging.INFO, logger=LOG):
        builder.build(0, common)
        builder.build(0, make_common([1, 1], [20, 40]))
    warning, saved = [record.getMessage() for record in caplog.records if "step" in record.getMessage()]
    assert warning.startswith("step 1 was not saved: ValueError('block_table[1]")
    assert "saved a step: fi-backend explain --step" in saved
    [path] = files(tmp_path)
    assert ".step2." in path.name
    assert list(tmp_path.glob("*.new")) == []


def test_a_full_disk_is_told_once(
    config: Any,
    counts: Counters,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(path: Path, _step: Any) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    make_layer(config, "layer")
    builder = make_builder(config, ["layer"])
    ask_for_steps(tmp_path, 500)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger=LOG):
        patch.setattr(step_capture, "save_step", full)
        for _ in range(3):
            builder.build(0, make_common([1, 1], [20, 40]))
    [warning] = [message for message in caplog.messages if "step" in message]
    assert warning.startswith("step 1 was not saved: OSError(28")
    assert list(tmp_path.glob("*.step*")) == []
    ask_for_steps(tmp_path, 1)
    builder.build(0, make_common([1, 1], [20, 40]))
    assert len(files(tmp_path)) == 1, "saved again once someone asks again"


def test_without_a_folder_nobody_can_ask(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_module, "_current", Counters())
    make_layer(config, "layer")
    monkeypatch.setattr(step_capture.Step, "capture", lambda *_, **__: pytest.fail("nobody has asked"))
    make_builder(config, ["layer"]).build(0, make_common([1], [5]))
