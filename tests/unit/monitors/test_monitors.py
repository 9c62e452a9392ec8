"""Metrics reach their file and the trackers, and no monitor can stop or delay a run."""

from __future__ import annotations

import importlib.util
import logging
import math
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.sections.monitors import (
    MlflowSection,
    MonitorsSection,
    SwanlabSection,
    TensorboardSection,
    TrackioSection,
    WandbSection,
)
from stretto.monitors.base import BackgroundMonitor, Monitors, build_monitors
from stretto.monitors.file import read_metrics


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def open_file(run_dir: RunDir, **more: int) -> Monitors:
    return build_monitors(MonitorsSection(), run_dir, "trainer", "run", **more)


def numbers(run_dir: RunDir, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in read_metrics(run_dir.metrics("trainer")) if name in row}


def test_calls_of_one_step_make_one_row(run_dir: RunDir) -> None:
    monitors = open_file(run_dir)
    monitors.log(1, {"loss": np.float32(0.5), "n": np.int64(3)})
    monitors.log(2, {"loss": 0.25})
    monitors.log(1, {"eval": 1.0})
    rows = read_metrics(run_dir.metrics("trainer"))
    assert [row["step"] for row in rows] == [1, 2]
    assert (rows[0]["loss"], rows[0]["n"], rows[0]["eval"], rows[0]["incarnation"]) == (0.5, 3, 1.0, 1)
    monitors.close()


def test_rows_are_on_disk_before_close(run_dir: RunDir) -> None:
    monitors = open_file(run_dir)
    monitors.log(1, {"loss": 1.0})
    assert numbers(run_dir, "loss") == {1: 1.0}
    monitors.close()


def test_numbers_that_are_not_finite_are_valid_json_and_read_as_nan(run_dir: RunDir) -> None:
    monitors = open_file(run_dir)
    monitors.log(1, {"loss": math.nan, "norm": math.inf})
    monitors.close()
    assert all(msgspec.json.decode(line) for line in run_dir.metrics("trainer").read_bytes().splitlines())
    (row,) = read_metrics(run_dir.metrics("trainer"))
    assert math.isnan(row["loss"]) and math.isnan(row["norm"])


def test_a_resumed_run_supersedes_the_steps_it_takes_back(run_dir: RunDir) -> None:
    first = open_file(run_dir)
    for step in range(1, 8):
        first.log(step, {"loss": 1.0, "old": 1.0})
    first.close()
    second = open_file(run_dir, resumed_step=4)
    assert numbers(run_dir, "loss") == dict.fromkeys(range(1, 5), 1.0)
    second.log(4, {"eval": 9.0})
    second.log(5, {"loss": 2.0})
    second.close()
    assert numbers(run_dir, "loss") == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0}
    assert numbers(run_dir, "eval") == {4: 9.0}
    assert numbers(run_dir, "old") == dict.fromkeys(range(1, 5), 1.0)


def test_without_a_resumed_step_the_first_new_row_says_where(run_dir: RunDir) -> None:
    first = open_file(run_dir)
    for step in range(1, 6):
        first.log(step, {"loss": 1.0})
    first.close()
    second = open_file(run_dir)
    second.log(3, {"loss": 2.0})
    second.log(4, {"loss": 2.0})
    second.close()
    assert numbers(run_dir, "loss") == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_line_cut_by_a_crash_loses_that_line_only(run_dir: RunDir, cut: int) -> None:
    first = open_file(run_dir)
    for step in range(1, 4):
        first.log(step, {"loss": 1.0})
    first.close()
    path = run_dir.metrics("trainer")
    path.write_bytes(path.read_bytes()[:-cut])
    assert set(numbers(run_dir, "loss")) >= {1, 2}
    second = open_file(run_dir, resumed_step=2)
    second.log(3, {"loss": 2.0})
    second.close()
    assert numbers(run_dir, "loss") == {1: 1.0, 2: 1.0, 3: 2.0}
    assert read_metrics(path)[-1]["incarnation"] == 2


def test_incarnations_count_on_after_long_rows(run_dir: RunDir) -> None:
    for expected in range(1, 4):
        monitors = open_file(run_dir)
        monitors.log(expected, {"text": "x" * 100_000})
        monitors.close()
        assert read_metrics(run_dir.metrics("trainer"))[-1]["incarnation"] == expected


def test_no_file_reads_as_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


class Broken:
    """A monitor that fails at the second row."""

    rows = 0

    def log(self, step: int, metrics: dict) -> None:
        self.rows += 1
        if self.rows == 2:
            raise OSError("no space left")

    def log_table(self, step: int, name: str, rows: list) -> None:
        raise AssertionError("a dropped monitor is not touched again")

    def close(self) -> None:
        raise AssertionError("a dropped monitor is not touched again")


def test_a_monitor_that_fails_is_dropped_with_one_error(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    monitors = Monitors({"broken": broken})
    for step in range(5):
        monitors.log(step, {})
    monitors.close()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["monitor broken failed and is off from now on: OSError: no space left"]
    assert broken.rows == 2


def test_a_tracker_that_cannot_start_is_dropped_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> Broken:
        raise RuntimeError("not logged in")

    monitors = Monitors({"tracker": BackgroundMonitor("tracker", build)})
    while monitors._monitors:
        monitors.log(1, {})
    monitors.close()
    assert "not logged in" in caplog.text


SAMPLES = [{"reward": 0.5, "reply": "<user>2 | 3?\n5"}]
DISTRIBUTIONS = {"reward/distribution": np.array([0.0, 0.5, 1.0, 1.0])}


class Gate:
    """A monitor that blocks until the test lets it go on."""

    def __init__(self) -> None:
        self.opened, self.rows, self.is_closed = threading.Event(), [], False

    def log(self, step: int, metrics: dict) -> None:
        self.opened.wait()
        self.rows.append(step)

    def log_table(self, step: int, name: str, rows: list) -> None:
        self.rows.append(name)

    def log_histograms(self, step: int, values: dict) -> None:
        self.rows.append(tuple(values))

    def close(self) -> None:
        self.is_closed = True


def test_a_slow_tracker_does_not_hold_up_the_caller_and_is_drained_on_close() -> None:
    gate = Gate()
    monitors = Monitors({"gate": BackgroundMonitor("gate", lambda: gate)})
    for step in range(100):
        monitors.log(step, {})
    monitors.log_table(100, "eval/samples", SAMPLES)
    monitors.log_table(101, "nothing", [])
    monitors.log_histograms(101, DISTRIBUTIONS)
    assert gate.rows == [] and monitors.has_trackers
    gate.opened.set()
    monitors.close()
    assert gate.rows == [*range(100), "eval/samples", ("reward/distribution",)] and gate.is_closed


def test_close_gives_up_on_a_stuck_tracker_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    monitors = Monitors({"gate": BackgroundMonitor("gate", lambda: gate)})
    monitors.log(1, {})
    monitors.close(timeout_s=0.2)
    assert "last rows are lost" in caplog.text
    gate.opened.set()


def test_metrics_are_copied_when_they_are_logged() -> None:
    logged = []

    class Keep(Gate):
        def log(self, step: int, metrics: dict) -> None:
            self.opened.wait()
            logged.append(metrics["a"])

    keep = Keep()
    monitors = Monitors({"keep": BackgroundMonitor("keep", lambda: keep)})
    metrics = {"a": 1.0}
    monitors.log(1, metrics)
    metrics["a"] = 2.0
    keep.opened.set()
    monitors.close()
    assert logged == [1.0]


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("wandb", WandbSection()),
        ("tensorboard", TensorboardSection()),
        ("trackio", TrackioSection()),
        ("mlflow", MlflowSection()),
        ("swanlab", SwanlabSection(offline=True)),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    run_dir: RunDir, name: str, section: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else found(n))
    with pytest.raises(ConfigError, match=rf"\[monitors.{name}\].*pip install 'stretto\[{name}\]'"):
        build_monitors(MonitorsSection(**{name: section}), run_dir, "trainer", "run")
