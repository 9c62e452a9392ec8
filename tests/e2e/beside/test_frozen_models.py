"""Models beside the policy in whole runs: several teachers, a judge with a bound of costs; and rollouts with parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import merged, rl, sorting, untrained_model

from stretto.ledger.audit import audit

JUDGE = "stretto.examples.judge.judge:Judged"


@pytest.fixture(scope="module")
def settings(sorter: Path) -> dict[str, Any]:
    return sorting(sorter, 3)


@pytest.mark.slow
def test_environments_learn_from_models_of_the_run_with_weights(
    settings: dict[str, Any], warmed_up: Callable[..., Path], tmp_path: Path
) -> None:
    """Two engines of `rl`: one environment has both as teachers, one is played by one of them, one has rewards."""
    good = warmed_up(max_steps=300, seed=1, scheduler={"type": "constant", "warmup_steps": 20})
    poor = warmed_up(max_steps=40, seed=1)
    env = settings["orchestrator"]["env"][0]
    algos = {
        "both": {"type": "opd", "teachers": {"good": 3.0, "poor": 1.0}},
        "copied": {"type": "sft", "teachers": {"good": 1.0}},
        "rewarded": {"type": "grpo"},
    }
    taught = {
        "models": {name: {"model": model, "device": "cpu"} for name, model in (("good", good), ("poor", poor))},
        "orchestrator": {"env": [env | {"name": name, "algo": algo} for name, algo in algos.items()], "batch_size": 48},
    }
    ended = rl(tmp_path, merged(settings, taught))
    assert all((ended.run.logs / f"model_{name}.log").exists() for name in ("good", "poor"))
    for row in ended.steps().values():
        good_kl, poor_kl = row["env/both/teacher_kl/good"], row["env/both/teacher_kl/poor"]
        assert row["env/both/teacher_kl"] == pytest.approx(0.75 * good_kl + 0.25 * poor_kl, abs=1e-5)
        assert row["reward/copied/mean"] > row["reward/rewarded/mean"]
    for row in ended.steps("trainer").values():
        assert {"teacher_kl/mean", "nll/mean"} <= row.keys()
    assert audit(ended.run) == []


@pytest.mark.slow
def test_a_run_ends_in_order_when_its_judge_has_cost_enough_and_goes_on_with_more(
    settings: dict[str, Any], sorter: Path, tmp_path: Path
) -> None:
    client = {"prompt_price": 1000.0, "reply_price": 1000.0}
    judged = {
        "max_steps": 6,
        "models": {"frozen": {"model": sorter, "served_model_name": "judge", "device": "cpu", "client": client}},
        "orchestrator": {"env": [{"id": JUDGE, "models": {"judge": "frozen"}}]},
    }
    judged = merged(settings, judged)
    few = merged(judged, {"models": {"frozen": {"client": {"max_cost": 0.5}}}})
    ended = rl(tmp_path, few)
    step = ended.summary()["steps"]
    assert "max_cost" in ended.summary()["stopped_because"] and step < 6
    costs = ended.column("models/frozen/cost")
    assert costs == sorted(costs) and all(cost < 1.0 for cost in costs)
    refused = rl(tmp_path, few, "--resume", is_ok=False)
    assert refused.code != 0 and "models.frozen has cost" in refused.output
    more = rl(tmp_path, merged(judged, {"models": {"frozen": {"client": {"max_cost": 50.0}}}}), "--resume")
    assert more.summary()["steps"] == 6 and more.column("models/frozen/cost")[-1] > 0.5
    assert audit(more.run) == []


@pytest.mark.slow
def test_parts_of_rollouts_are_learned_from_their_own_rewards(tmp_path: Path) -> None:
    team = {
        "seq_len": 256,
        "max_steps": 30,
        "model": {"name": untrained_model(tmp_path)},
        "orchestrator": {
            "batch_size": 64,
            "group_size": 8,
            "max_async_level": 0,
            "algo": {"type": "grpo", "turns": {"type": "returns", "gamma": 0.0, "weight": 1.0}},
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "envs:Team", "name": "team", "num_workers": 1}],
        },
        "trainer": {"optim": {"lr": 1e-2}},
    }
    ended = rl(tmp_path, team)
    for name in ("reward/mean", "env/team/one/reward", "turns/reward"):
        rewards = ended.column(name)
        assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1, (name, rewards)
    with ended.ledger() as ledger:
        rows = ledger.rows("SELECT metrics, turns FROM rollouts WHERE status = 'truncated' LIMIT 20")
    for row in rows:
        assert {"one/reward", "several/reward"} <= row["metrics"].keys()
        assert {turn["agent"] for turn in json.loads(row["turns"])} == {"one", "policy", "several"}
    assert rows and audit(ended.run) == []
