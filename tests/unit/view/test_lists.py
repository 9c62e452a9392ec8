"""`stretto runs`, `stretto show` and `stretto rollouts`: as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import FakeEngine, FakeTrainer, parrot
from orchestrator_runs import config, train

from stretto.base.errors import ConfigError
from stretto.view.commands import rollouts, runs, show


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
    with pytest.raises(ConfigError, match="nowhere: there is no such directory"):
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


def test_rollouts_as_json_are_the_rows_with_their_tokens(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rollouts([str(path), "--min-reward", "0.5", "--limit", "4", "--json"]) == 0
    rows = json.loads(printed(capsys))
    assert len(rows) == 4 and all(
        row["reward"] >= 0.5 and len(row["token_ids"]) == row["num_tokens"] for row in rows
    )
