"""`sft` ends at a checkpoint within one step of its budget, and its starts are added up."""

from __future__ import annotations

import json

import pytest
from sft_runs import config, same_weights, undisturbed_threads_and_logging, weights  # noqa: F401

from stretto.base.errors import ConfigError
from stretto.config.load import dump, load, write_json
from stretto.config.root import SFTConfig
from stretto.monitors.file import read_metrics
from stretto_sft import training as sft

pytestmark = pytest.mark.heavy
EXPORTS = {"interval": 2, "weights": {"interval": 2, "keep_last": None}, "keep_last": None}


def run(path, **changes):
    cfg = config(path, ckpt=EXPORTS, val=None, **changes)
    assert sft.main(cfg) == 0
    return cfg, json.loads(cfg.run_dir.summary.read_text())


def test_tokens_end_the_run_at_a_checkpoint_and_a_larger_budget_goes_on_as_if_it_had_not_ended(tmp_path):
    whole, _ = run(tmp_path / "whole", max_steps=8)
    total = [row["budget/tokens"] for row in read_metrics(whole.run_dir.metrics("sft")) if "budget/tokens" in row]
    cfg, summary = run(tmp_path / "cut", max_steps=8, budget={"max_tokens": int(total[4]) - 1})
    assert summary["steps"] == 5 == cfg.run_dir.latest_complete_checkpoint()
    assert summary["stopped_because"].startswith("budget.max_tokens = ")
    assert summary["used"]["tokens"] == total[4]
    with pytest.raises(ConfigError, match=r"budget.max_tokens = .*raise it, or leave it out"):
        run(tmp_path / "cut", max_steps=8, resume={}, budget={"max_tokens": int(total[4])})
    cfg, summary = run(tmp_path / "cut", max_steps=8, resume={}, budget={"max_tokens": 10**6})
    assert summary["steps"] == 8 and summary["used"]["tokens"] == total[-1] and summary["stopped_because"] is None
    assert same_weights(weights(cfg, 8), weights(whole, 8))


def test_hours_are_added_up_with_those_of_steps_that_a_resume_takes_back(tmp_path):
    _, first = run(tmp_path, max_steps=6)
    _, second = run(tmp_path, max_steps=6, resume={"step": 2})
    assert second["used"]["tokens"] > first["used"]["tokens"] and second["used"]["hours"] > first["used"]["hours"]


def test_hours_end_the_run(tmp_path):
    cfg, summary = run(tmp_path, max_steps=10**6, budget={"max_hours": 2 / 3600, "prices": {"hour": 3600.0}})
    assert summary["stopped_because"].startswith("budget.max_hours") and summary["used"]["cost"] >= 2.0
    assert cfg.run_dir.latest_complete_checkpoint() == summary["steps"]


def test_hours_that_are_over_before_the_first_step_are_told_and_a_resume_asks_for_more(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(sft.Purse, "check", lambda purse: None)  # they are over after the start, which may take longer
    cfg, summary = run(tmp_path, budget={"max_hours": 1e-9})
    said = capfd.readouterr().err
    assert "nothing was trained: budget.max_hours = 1e-09, and the run has used" in said
    assert "next: the same command with --budget.max-hours " in said
    assert summary["steps"] == 0 and summary["stopped_because"].startswith("budget.max_hours = 1e-09")
    again = ["@", str(tmp_path / "again.json"), "--resume"]
    write_json(tmp_path / "again.json", dump(cfg))
    with pytest.raises(ConfigError, match=r"ended before its first step: budget.max_hours = 1e-09"):
        load(SFTConfig, again, verb="sft")
    assert load(SFTConfig, [*again, "--budget.max-hours", "1"], verb="sft").resume is None, "it begins anew"
