"""`stretto runs`, `stretto show` and `stretto rollouts`: as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.base.errors import ConfigError
from stretto.base.paths import RunDir
from stretto.launch.control import status
from stretto.state import describe
from stretto_view.commands import plot, rollouts, runs, show


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of eight rollouts, with evals of versions 0, 2, 4 and 5."""
    cfg = config(tmp_path_factory.mktemp("runs"), eval={"num_examples": 4, "interval": 2, "sampling": {}})
    train(cfg, FakeEngine(parrot(0.5)), FakeTrainer(max_steps=5))
    cfg.run_dir.configs.mkdir()
    resolved = {"model": {"name": None}, "tokenizer": {"name": None}, "max_steps": 5}
    cfg.run_dir.config("run").write_text(json.dumps(resolved))
    return cfg.run_dir.path


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_runs_are_a_line_each(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs([str(path.parent)]) == 0
    head, line = printed(capsys).splitlines()
    assert head.split() == ["run", "verb", "state", "step", "reward", "loss", "age"]
    assert line.startswith(f"{path}  rl") and "5 of 5" in line and "done" in line
    assert runs([str(path), str(path.parent), "--json"]) == 0
    [row] = json.loads(printed(capsys))
    assert row["step"] == 5 and row["state"] == "done" and 0 < row["reward"] < 1


def test_where_there_is_no_run_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run there; a run is a directory"):
        runs([str(tmp_path)])
    with pytest.raises(ConfigError, match=r"nowhere: .*no such directory"):
        runs([str(tmp_path / "nowhere")])


def test_a_runs_summary_has_its_latest_metrics_evals_and_rollouts(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([str(path)]) == 0
    text = printed(capsys)
    assert text.startswith(f"{path}: rl, done, step 5 of 5") and "reward/mean" in text
    assert f"stretto rollouts {path} --worst 3" in text
    assert show([str(path), "--json"]) == 0
    found = json.loads(printed(capsys))
    assert {row["version"] for row in found["evals"]} == {0, 5}
    assert found["rollouts"]["finished"] >= 40 and found["metrics"]["reward/mean"] == found["reward"]


def test_rollouts_as_json_are_the_rows_with_their_tokens(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollouts([str(path), "--min-reward", "0.5", "--limit", "4", "--json"]) == 0
    rows = json.loads(printed(capsys))
    assert len(rows) == 4 and all(row["reward"] >= 0.5 and len(row["token_ids"]) == row["num_tokens"] for row in rows)


@pytest.fixture
def copy(path: Path, tmp_path: Path) -> Path:
    """The run of five steps, in a directory of its own."""
    return Path(shutil.copytree(path, tmp_path / "copy"))


def with_steps(run: Path, last: int, **summary: int) -> None:
    """Let the run's metrics end with this step, and its summary say this."""
    file = run / "metrics" / "orchestrator.jsonl"
    rows = [line for line in file.read_text().splitlines() if json.loads(line).get("step", 0) <= last]
    file.write_text("\n".join(rows) + "\n")
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("steps", "summary", "state"),
    [
        (5, {"steps": 5, "max_steps": 5}, "done"),
        (3, {"steps": 3, "max_steps": 5}, "stopped"),
        (4, {"steps": 3, "max_steps": 5}, "ended"),  # stopped after step 3, resumed, killed after step 4
    ],
)
def test_a_summary_says_whether_a_run_was_stopped(
    copy: Path, steps: int, summary: dict[str, int], state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_steps(copy, steps, **summary)
    assert runs([str(copy), "--json"]) == 0
    [row] = json.loads(printed(capsys))
    assert (row["state"], row["step"], row["missing"]) == (state, steps, None)
    (copy / "summary.json").unlink()
    assert describe(RunDir(copy))["state"] == ("done" if steps == 5 else "ended")


def test_a_directory_that_only_a_dry_run_wrote_was_never_started(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = tmp_path / "dry"
    dry.mkdir()
    shutil.copytree(copy / "configs", dry / "configs")
    (dry / "plan.json").write_text("{}")
    for path, state in ((dry, "not started"), (copy, "done")):
        assert describe(RunDir(path))["state"] == state
        assert status([str(path)]) == 0
        assert f"state  {state}\n" in printed(capsys)


def test_a_run_without_a_last_step_ends_by_being_stopped(copy: Path) -> None:
    with_steps(copy, 4, steps=4)
    (copy / "configs" / "run.json").write_text('{"orchestrator": {}}')
    assert describe(RunDir(copy))["state"] == "stopped"


def test_the_ledger_says_how_far_a_run_is_whose_metrics_were_deleted(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = describe(RunDir(copy))
    shutil.rmtree(copy / "metrics")
    row = describe(RunDir(copy))
    assert row["step"] == 5 and row["state"] == "done" and row["reward"] == pytest.approx(before["reward"])
    assert 0 <= row["age_s"] < 3600
    assert "metrics/orchestrator.jsonl is missing: the step is the ledger's" in row["missing"]
    assert show([str(copy)]) == 0
    text = printed(capsys)
    assert text.startswith(f"{copy}: rl, done, step 5 of 5") and row["missing"] in text
    assert rollouts([str(copy), "--limit", "1"]) == 0
    assert "step 5 " in printed(capsys).splitlines()[0]
    with pytest.raises(ConfigError, match=r"no step is logged: .*orchestrator\.jsonl is missing"):
        plot([str(copy), "--out", str(copy / "plot.png")])


def test_a_run_of_sft_whose_metrics_were_deleted_is_as_far_as_its_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.config("run").write_text('{"data": {}, "max_steps": null}')
    assert describe(run)["step"] is None and describe(run)["missing"] is None
    run.checkpoint(3).mkdir(parents=True)
    run.complete_marker(3).write_text("")
    assert describe(run)["step"] == 3 and "the step is the newest checkpoint's" in describe(run)["missing"]
    run.summary.write_text('{"steps": 4, "max_steps": 9}')
    assert describe(run)["state"] == "stopped" and "the step is the summary's" in describe(run)["missing"]
