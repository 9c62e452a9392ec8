"""What trackers write: rows, tables and histograms, without a network."""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from test_mlflow_swanlab import picture

from stretto.base.paths import RunDir
from stretto.config.sections.monitors import MonitorsSection, TensorboardSection, TrackioSection, WandbSection
from stretto.monitors.base import build_monitors
from stretto_trackers import run_id

SAMPLES = [{"reward": 0.5, "reply": "<user>2 | 3?\n5"}]
DISTRIBUTIONS = {"reward/distribution": np.array([0.0, 0.5, 1.0, 1.0])}


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def write_config(run_dir: RunDir) -> None:
    path = run_dir.config("run")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"seq_len": 64, "teacher": {"api_key": "secret"}}))


@pytest.mark.heavy
@pytest.mark.skipif(is_missing("tensorboard"), reason="extra `tensorboard` is not installed")
@pytest.mark.filterwarnings("default")
def test_tensorboard_files_hold_what_was_logged(run_dir: RunDir) -> None:
    write_config(run_dir)
    section = MonitorsSection(tensorboard=TensorboardSection())
    for resumed_step, steps in ((None, range(1, 6)), (3, range(4, 7))):
        monitors = build_monitors(section, run_dir, "trainer", "run", resumed_step=resumed_step)
        for step in steps:
            monitors.log(step, {"loss": step / 2 + 10 * (resumed_step is not None), "note": "text"})
        assert list(monitors._monitors) == ["file", "tensorboard"]
        monitors.log_table(6, "eval/samples", SAMPLES)
        monitors.log_histograms(6, DISTRIBUTIONS)
        monitors.close()
        time.sleep(1.1)  # files are named by the second
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.path / "tensorboard" / "trainer"))
    events.Reload()
    text = events.Tensors("eval/samples")[-1].tensor_proto.string_val[0].decode()
    assert "| 0.5 | &lt;user>2 \\| 3?<br>5 |" in text.splitlines() and text.startswith("| reward | reply |")
    assert {"eval/samples", "config"} <= set(events.PluginTagToContent("text"))
    config = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert '"seq_len": 64' in config and "secret" not in config
    histogram = events.Histograms("reward/distribution")[-1].histogram_value
    assert (histogram.min, histogram.max, histogram.num, sum(histogram.bucket)) == (0.0, 1.0, 4, 4)
    assert histogram.bucket[0] == 1 and histogram.bucket[-1] == 2
    found = {event.step: event.value for event in events.Scalars("loss")}
    assert found == {1: 0.5, 2: 1.0, 3: 1.5, 4: 12.0, 5: 12.5, 6: 13.0}


@pytest.mark.heavy
@pytest.mark.skipif(is_missing("wandb"), reason="extra `wandb` is not installed")
@pytest.mark.filterwarnings("default")
def test_wandb_offline_writes_a_run_without_a_network(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(run_dir.path / "staged"))
    write_config(run_dir)
    monkeypatch.setattr(tempfile, "tempdir", str(run_dir.path))  # what it keeps until the process ends
    section = MonitorsSection(wandb=WandbSection(project="tests", offline=True))
    monitors = build_monitors(section, run_dir, "trainer", "run")
    for step in range(1, 4):
        monitors.log(step, {"loss": 1.0 / step})
    monitors.log_table(3, "eval/samples", SAMPLES)
    monitors.log_table(3, "seen", [{"prompt": "a", "images": (picture(),)}, {"prompt": "b", "images": ()}])
    monitors.log_histograms(3, DISTRIBUTIONS)
    monitors.close(timeout_s=60)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    staged = [file.read_bytes() for file in run_dir.path.glob("staged/artifacts/staging/*")]
    assert [content for content in staged if content.startswith(b"\x89PNG")], "images go with the table's artifact"
    [table] = run_dir.path.glob("wandb/offline-run-*/files/media/table/eval/samples*.table.json")
    assert json.loads(table.read_text())["data"] == [list(SAMPLES[0].values())]
    (file,) = run_dir.path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss" in (written := file.read_bytes()) and b"seq_len" in written and b'"histogram"' in written


@pytest.mark.skipif(is_missing("trackio"), reason="extra `trackio` is not installed")
@pytest.mark.filterwarnings("default")
def test_trackio_takes_rows(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    write_config(run_dir)
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir.path / "trackio"))
    monitors = build_monitors(MonitorsSection(trackio=TrackioSection(project="t")), run_dir, "trainer", "run")
    monitors.log(1, {"loss": 0.5})
    monitors.log_table(1, "eval/samples", SAMPLES)
    monitors.log_table(2, "seen", [{"prompt": "a", "images": (picture(),)}, {"prompt": "b", "images": ()}])
    monitors.log_histograms(1, DISTRIBUTIONS)
    monitors.close(timeout_s=60)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    import trackio

    [shown] = run_dir.path.glob("trackio/media/**/*.png")
    assert shown.read_bytes().startswith(b"\x89PNG")
    [run] = trackio.Api().runs("t")
    assert run.name == "run" and run.config["seq_len"] == 64 and "secret" not in str(run.config)


@pytest.mark.parametrize("left", [None, "", "\n"])
def test_the_run_of_wandb_keeps_its_id_and_gets_one_if_a_power_cut_took_it(tmp_path: Path, left: str | None) -> None:
    path = tmp_path / "wandb_id"
    if left is not None:
        path.write_text(left)
    first = run_id(path)
    assert first and run_id(path) == first
