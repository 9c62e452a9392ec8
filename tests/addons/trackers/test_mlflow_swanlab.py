"""MLflow and SwanLab get metrics, tables, images and distributions; a resumed run is the same run there."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.config.sections.monitors import MlflowSection, MonitorsSection, SwanlabSection
from stretto.monitors.base import build_monitors
from stretto_trackers.swanlab import SwanlabMonitor, find_mode

pytestmark = pytest.mark.filterwarnings("default")  # those of the trackers' packages


def needs(package):
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"extra `{package}` is not installed")


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


ROWS = [{"prompt": "a", "reply": "b|c", "reward": 0.5, "images": (picture(),)}]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in ("MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = RunDir(tmp_path / "run")
    found.configs.mkdir(parents=True)
    config = {"seed": 3, "trainer": {"optim": {"lr": 1e-3}}, "orchestrator": {"env": [{"id": "sort-letters"}]}}
    found.config("run").write_text(json.dumps(config))
    return found


def logged(section: MonitorsSection, run: RunDir, steps, *, resumed: int | None = None) -> None:
    monitors = build_monitors(section, run, "orchestrator", "mine", resumed_step=resumed)
    for step in steps:
        monitors.log(step, {"reward/mean": step / 10, "eval/a/sampled/avg@4": 0.5, "note": "text"})
    monitors.log_table(steps[-1], "eval/samples", ROWS)
    monitors.log_histograms(steps[-1], {"rewards": np.arange(101.0)})
    names = list(monitors._monitors)
    monitors.close(timeout_s=60)
    assert len(names) == 2, "the tracker has failed"


@needs("mlflow")
@pytest.mark.heavy
def test_mlflow_without_a_server_has_one_run_with_all_of_it_also_after_a_resume(run: RunDir) -> None:
    from mlflow.tracking import MlflowClient

    section = MonitorsSection(mlflow=MlflowSection(experiment="tests"))
    logged(section, run, [1, 2])
    logged(section, run, [3], resumed=2)
    client = MlflowClient(tracking_uri=f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tests")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED" and found.info.run_name == "mine"
    points = [(point.step, point.value) for point in client.get_metric_history(found.info.run_id, "reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3))]
    assert found.data.metrics["eval/a/sampled/avg-4"] == 0.5 and found.data.metrics["rewards/p50"] == 50.0
    assert found.data.params["trainer.optim.lr"] == "0.001"
    artifacts = run.path / "mlflow" / "artifacts" / found.info.run_id / "artifacts"
    table = json.loads((artifacts / "eval" / "samples" / "step_3.json").read_text())
    assert table == {"columns": ["prompt", "reply", "reward"], "data": [["a", "b|c", 0.5]]}
    assert json.loads((artifacts / "config.json").read_text())["seed"] == 3
    assert [each for each in artifacts.rglob("*.png") if "samples" in str(each)]


@needs("mlflow")
@pytest.mark.heavy
def test_mlflow_writes_where_its_environment_says(run: RunDir, tmp_path: Path, monkeypatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'all.db'}")
    monitors = build_monitors(MonitorsSection(mlflow=MlflowSection()), run, "orchestrator", "mine")
    monitors.log(1, {"reward/mean": 0.5})
    monitors.close(timeout_s=60)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'all.db'}")
    [found] = client.search_runs([client.get_experiment_by_name("stretto").experiment_id])
    assert found.data.metrics == {"reward/mean": 0.5} and not (run.path / "mlflow" / "mlflow.db").exists()


@needs("swanlab")
@pytest.mark.heavy
@pytest.mark.parametrize("by_environment", [False, True])
def test_swanlab_offline_writes_a_run_without_a_network(run: RunDir, monkeypatch, by_environment: bool) -> None:
    if by_environment:
        monkeypatch.setenv("SWANLAB_MODE", "offline")
    section = SwanlabSection(project="tests", offline=None if by_environment else True)
    logged(MonitorsSection(swanlab=section), run, [1, 2])
    [folder] = [path for path in (run.path / "swanlab").iterdir() if path.is_dir() and path.name.startswith("run-")]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size > 500 and list(folder.rglob("*.png"))


def test_the_mode_of_swanlab_is_that_of_the_environment_unless_the_section_has_one(run: RunDir, monkeypatch) -> None:
    assert find_mode(SwanlabSection()) == "online" and find_mode(SwanlabSection(offline=True)) == "offline"
    monkeypatch.setenv("SWANLAB_MODE", "local")
    assert (
        SwanlabMonitor.check_login(SwanlabSection()) == "local" and find_mode(SwanlabSection(offline=False)) == "online"
    )
    monkeypatch.setenv("SWANLAB_MODE", "cloud?")
    with pytest.raises(ConfigError, match=r"SWANLAB_MODE=cloud\? .*offline"):
        find_mode(SwanlabSection())


def test_an_online_run_of_swanlab_needs_a_key(run: RunDir, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"no key: set SWANLAB_API_KEY.*SWANLAB_MODE=offline"):
        SwanlabMonitor.check_login(SwanlabSection())
    monkeypatch.setenv("SWANLAB_API_KEY", "x")
    assert SwanlabMonitor.check_login(SwanlabSection()) == "online"
    monkeypatch.delenv("SWANLAB_API_KEY")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text("machine api.swanlab.cn password x\n")
    assert SwanlabMonitor.check_login(SwanlabSection()) == "online"
