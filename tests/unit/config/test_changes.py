"""What a resumed run has otherwise than it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.base import ports, process
from stretto.config.changes import changes
from stretto.config.load import build, dump, write_json
from stretto.config.root import RLConfig
from stretto.launch.plan.plan import plan

ENV = {"id": "sort-letters", "args": {"num_letters": 4}}
BASE = {"max_steps": 10, "model": {"name": "m"}, "orchestrator": {"env": [ENV]}}


def saved(tmp_path: Path, cfg: RLConfig) -> Path:
    file = tmp_path / "run.json"
    write_json(file, dump(cfg))
    return file


def config(**more: Any) -> RLConfig:
    return build(RLConfig, BASE | more)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, []),
        ({"max_steps": 20, "seed": 3}, ["max_steps: 10 -> 20", "seed: 0 -> 3", "inference.seed: 0 -> 3"]),
        ({"max_steps": None}, ["max_steps: 10 -> None"]),
        (
            {"orchestrator": {"env": [ENV | {"args": {"num_letters": 5}}]}},
            ["orchestrator.env.0.args.num_letters: 4 -> 5"],
        ),
        ({"orchestrator": {"env": [ENV, ENV | {"name": "b"}]}}, ["orchestrator.env: "]),
        ({"trainer": {"loss": {"type": "gspo"}}}, ["trainer.loss.type: "]),
        ({"model": {"name": "m", "lora": {"rank": 4}}}, ["model.lora: None -> "]),
        ({"output_dir": "elsewhere", "run": {"name": "other"}, "resume": {"step": 3}}, []),
        ({"inference": {"server": {"port": 9000}}}, []),
        ({"inference": {"api_key": "s3cret"}}, ["inference.api_key: None -> (not shown)"]),
        ({"env_vars": {"WANDB_API_KEY": "s3cret"}}, ["env_vars.WANDB_API_KEY: None -> (not shown)"]),
    ],
    ids=str,
)
def test_changed_keys_are_listed_with_both_values(tmp_path, more, expected):
    found = changes(saved(tmp_path, config()), config(**more))
    assert len(found) >= len(expected) and not (found and not expected), found
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)
    assert "s3cret" not in str(found)


def test_what_the_launcher_chooses_is_no_change(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ports, "SCOPE", tmp_path.name)
    cfg = config()
    file = saved(tmp_path, plan(cfg, cfg.run_dir).config)
    monkeypatch.setattr(process, "num_cores", lambda: 64)
    resolved = plan(cfg, cfg.run_dir).config
    assert changes(file, cfg, resolved) == []
    other = config(trainer={"num_threads": 3})
    [line] = changes(file, other, plan(other, other.run_dir).config)
    assert line.startswith("trainer.num_threads: ") and line.endswith("-> 3")


def test_a_config_that_cannot_be_read_says_nothing(tmp_path):
    assert changes(tmp_path / "none.json", config()) == []
    (tmp_path / "half.json").write_text(json.dumps({"max_steps": 10})[:-3])
    assert changes(tmp_path / "half.json", config()) == []
