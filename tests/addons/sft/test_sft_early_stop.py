"""`sft` keeps the weights with the lowest validation loss, and ends when that gets no lower."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from sft_runs import config, same_weights, undisturbed_threads_and_logging, weights  # noqa: F401

from stretto.config.sections.orchestrator import EarlyStopSection
from stretto_sft import training as sft

pytestmark = pytest.mark.heavy
VAL = {"interval": 2, "data": {"type": "environment", "id": "sort-letters", "num_rows": 8}}
EXPORTS = {"interval": 2, "weights": {"interval": 2, "keep_last": None}, "keep_last": None}


def run(path, *, max_steps, lr=3e-3, resume=None, **val):
    changes = {} if resume is None else {"resume": {"step": resume}}
    cfg = config(path, max_steps=max_steps, optim={"lr": lr}, val=VAL | val, ckpt=EXPORTS, **changes)
    assert sft.main(cfg) == 0
    return cfg, json.loads(cfg.run_dir.summary.read_text())


def best_of(cfg):
    folder = cfg.run_dir.best_weights
    return json.loads((folder / "best.json").read_text())["step"], load_file(folder / "model.safetensors")


def test_the_weights_with_the_lowest_loss_are_kept(tmp_path):
    cfg, summary = run(tmp_path, max_steps=8, keep_best=True)
    step, best = best_of(cfg)
    assert step == 8 and same_weights(best, weights(cfg, 8)) and (cfg.run_dir.best_weights / "tokenizer.json").exists()
    cfg, again = run(tmp_path, max_steps=12, lr=10.0, resume=8, keep_best=True)  # from here on it gets worse
    step, best = best_of(cfg)
    assert step == 8 and same_weights(best, weights(cfg, 8)) and again["val_loss"] > summary["val_loss"] + 1


def test_the_run_ends_when_the_loss_gets_no_lower_also_counting_those_before_a_resume(tmp_path):
    stop = {"patience": 3, "min_delta": 100.0}
    cfg, summary = run(tmp_path, max_steps=40, early_stop=stop)
    assert summary["steps"] == 8 and "3 evals since version 2" in summary["stopped_because"]
    assert cfg.run_dir.weights_step(8).exists() and cfg.run_dir.latest_complete_checkpoint() == 8
    _, summary = run(tmp_path, max_steps=40, resume=4, early_stop=stop)
    assert summary["steps"] == 8 and "3 evals since version 2" in summary["stopped_because"]


def test_the_run_ends_as_soon_as_the_loss_is_low_enough(tmp_path):
    _, summary = run(tmp_path, max_steps=40, early_stop={"target": 100.0})
    assert summary["steps"] == 2 and "target is 100" in summary["stopped_because"]


@pytest.mark.parametrize("target", [None, 0.5])
def test_a_loss_is_judged_as_the_reward_with_the_other_sign(target):
    losses = {1: 2.0, 2: 1.5, 3: 1.5, 4: 0.75, 5: 1.0}
    loss = EarlyStopSection(patience=2, target=target)
    reward = EarlyStopSection(patience=2, target=target and -target)
    for last in range(1, 6):
        seen = {step: value for step, value in losses.items() if step <= last}
        rewards = {step: -value for step, value in seen.items()}
        assert (loss.reason_to_stop(seen, is_loss=True) is None) == (reward.reason_to_stop(rewards) is None)
