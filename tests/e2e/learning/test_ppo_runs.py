"""PPO with a critic through `rl`: both learn, both are exported, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import merged, rl, untrained_model

PPO = {
    "algo": {"type": "ppo"},
    "advantages": {"type": "gae", "lambd": 0.9, "kl_coef": 0.01},
    "critic": {"lr": 1e-2, "num_critic_only_steps": 2, "value_clip": None},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("model"))


def settings(model, max_steps, **trainer):
    return {
        "max_steps": max_steps,
        "seq_len": 256,
        "model": {"name": model},
        "ckpt": {"interval": 5, "weights": {"interval": 5}},
        "orchestrator": {
            "batch_size": 64,
            "group_size": 1,
            "max_async_level": 0,
            "algo": PPO["algo"],
            "train": {"sampling": {"max_completion_tokens": 6}},
            "env": [{"id": "envs:Vowels"}],
        },
        "trainer": merged(
            {
                "loss": {"type": "ppo", "use_rollout_logprobs": False},
                "advantages": PPO["advantages"],
                "critic": PPO["critic"],
                "optim": {"lr": 1e-2},
                "updates_per_step": 2,
            },
            trainer,
        ),
    }


def test_policy_and_critic_learn_and_a_resumed_run_is_the_same_run(model, tmp_path):
    for name in ("whole", "rest"):
        (tmp_path / name).mkdir()
    whole = rl(tmp_path / "whole", settings(model, 15))
    rewards = whole.column("reward/mean")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    variances = whole.column("critic/explained_variance", "trainer")
    assert len(variances) == 15 and variances[-1] > variances[0] and max(variances) > 0
    assert "optim/lr" not in whole.steps("trainer")[2] and whole.steps("trainer")[3]["optim/updates"] == 2
    assert whole.column("reference_kl/mean", "trainer")[-1] > 0
    rest = rl(tmp_path / "rest", settings(model, 15), "--resume.dir", str(whole.run.checkpoint(10)))
    assert rest.weights(15) == whole.weights(15)
    name = Path("step_15") / "model.safetensors"
    ours, theirs = ((ended.run.critic / name).read_bytes() for ended in (whole, rest))
    assert ours == theirs
    config = json.loads((whole.run.critic / "step_15" / "config.json").read_text())
    assert config["num_labels"] == 1 and config["architectures"][0].endswith("ForSequenceClassification")
