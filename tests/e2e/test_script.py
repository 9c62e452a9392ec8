"""The Python interface, used as a script does: train, then look at the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import untrained_model

import stretto
from stretto.base.errors import ConfigError


def test_a_script_trains_and_reads_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "max_steps": 2,
        "seq_len": 128,
        "run": {"name": "run"},
        "model": {"name": untrained_model(tmp_path / "model")},
        "orchestrator": {
            "batch_size": 8,
            "group_size": 4,
            "filter_zero_advantages": False,
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "sort-letters", "args": {"num_letters": 4}}],
        },
    }
    with pytest.raises(ConfigError, match=r"orchestrator\.groop_size"):
        stretto.rl({**config, "orchestrator": {"groop_size": 3}})
    run = stretto.rl(config, "--output-dir", str(tmp_path / "out"))
    assert run.path == tmp_path / "out" / "run" and "step 2/2" in capsys.readouterr().out
    rows = run.rollouts(step=2)
    assert len(rows) == 8
    for row in rows:
        asked = row["task_id"] and row["prompt"]
        assert "user" in asked and row["num_sampled_tokens"] <= 6
    assert run.config["seq_len"] == 128 and [row["step"] for row in run.metrics()][-1] == 2
