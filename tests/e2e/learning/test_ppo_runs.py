"""PPO with a critic through `rl`: both learn, both are exported, and a resumed run continues bit for bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from ports import free_ports
from runs import merged, rl, start_rl, until, untrained_model, wait
from safetensors.torch import load_file

from stretto.base.paths import RunDir

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_critic_learns_from_rewards_of_turns(model, tmp_path):
    """The rollouts have no reward of their own: all that is learned are the rewards of turns."""
    turns = settings(model, 15)
    turns["orchestrator"]["env"] = [{"id": "envs:VowelTurns"}]
    ended = rl(tmp_path, turns)
    assert set(ended.column("reward/mean")) == {0.0}
    rewards = ended.column("turns/reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    returns, values = (ended.column(f"critic/{name}/mean", "trainer") for name in ("return", "value"))
    assert returns[-1] > returns[0] > 0 and abs(values[-1] - returns[-1]) < abs(values[0] - returns[0])
    assert max(ended.column("critic/explained_variance", "trainer")) > 0


@pytest.mark.slow
def test_a_critic_on_ranks_of_its_own_learns_the_same_weights(model, tmp_path):
    runs = {}
    for name, placement in {"shared": {}, "own": {"placement": {"port": free_ports(1)[0]}}}.items():
        (tmp_path / name).mkdir()
        runs[name] = rl(tmp_path / name, settings(model, 10, critic=placement))
    shared, own = runs["shared"], runs["own"]
    assert own.weights(10) == shared.weights(10)
    critics = [each.run.critic / "step_10" / "model.safetensors" for each in (shared, own)]
    assert critics[0].read_bytes() == critics[1].read_bytes()
    for name in ("critic/value_loss", "critic/grad_norm", "reward/mean"):
        assert own.column(name) == shared.column(name), name
    assert (own.run.checkpoint(5) / "critic" / "state.json").exists() and own.run.complete_marker(5).exists()
    (tmp_path / "rest").mkdir()
    more = settings(model, 10, critic={"placement": {"port": free_ports(1)[0]}})
    rest = rl(tmp_path / "rest", more, "--resume.dir", str(own.run.checkpoint(5)))
    assert rest.weights(10) == own.weights(10)
    assert (rest.run.critic / "step_10" / "model.safetensors").read_bytes() == critics[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_critic_with_a_place_of_its_own_is_exported_there_though_the_policy_is_not(model, tmp_path, is_alone):
    critic = {"save": str(tmp_path / "critic")} | ({"placement": {"port": free_ports(1)[0]}} if is_alone else {})
    given = settings(model, 3, critic=critic)
    given["ckpt"] = {"interval": 2, "weights": "None"}
    ended = rl(tmp_path, given)
    assert {each.name for each in (tmp_path / "critic").iterdir()} == {"step_2", "step_3"}
    assert all((each / "model.safetensors").exists() for each in (tmp_path / "critic").iterdir())
    assert not ended.run.weights_step(3).exists() and ended.run.complete_marker(3).exists()


@pytest.mark.slow
def test_one_rank_of_a_critic_may_have_the_batches_of_two_of_the_policys(model, tmp_path):
    found = {}
    for name, placement in {"shared": {}, "own": {"placement": {"port": free_ports(1)[0]}}}.items():
        (tmp_path / name).mkdir()
        given = settings(model, 3, critic=placement | {"num_critic_only_steps": 1})
        given["orchestrator"]["num_train_workers"] = 2
        given["trainer"]["optim"] = {"type": "sgd", "lr": 0.1}  # AdamW makes much of the order of small sums
        ended = rl(tmp_path / name, given)
        files = (ended.run.weights_step(3), ended.run.critic / "step_3")
        found[name] = [
            {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
            for folder in files
        ]
    for shared, own in zip(found["shared"], found["own"]):
        assert shared.keys() == own.keys()
        for tensor, weights in shared.items():
            torch.testing.assert_close(own[tensor], weights, atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["critic", "trainer"])
def test_the_death_of_either_role_ends_the_run_and_names_it(role, model, tmp_path):
    popen = start_rl(tmp_path, settings(model, 1000, critic={"placement": {"port": free_ports(1)[0]}}))
    run = RunDir(tmp_path / "run")
    until(lambda: run.metrics("trainer").exists(), popen, "the first step")
    processes = psutil.Process(popen.pid).children(recursive=True)
    (victim,) = [each.pid for each in processes if f" {role} @ " in " ".join(each.cmdline())]
    os.kill(victim, signal.SIGKILL)
    code, output = wait(popen)
    assert code == 1 and f"FAILED: {role} (pid" in output, output


@pytest.mark.slow
def test_trainer_and_engine_that_take_turns_learn_the_same_weights(model, tmp_path):
    runs = {}
    for name, colocate in {"apart": {}, "turns": {"colocate": {}}, "level 1": {"colocate": {"sleep_level": 1}}}.items():
        (tmp_path / name).mkdir()
        runs[name] = rl(tmp_path / name, settings(model, 6) | colocate)
    for name in ("turns", "level 1"):
        assert runs[name].weights(6) == runs["apart"].weights(6), name
        assert runs[name].column("reward/mean") == runs["apart"].column("reward/mean")
    log = (runs["turns"].run.logs / "inference.log").read_text()
    assert log.count("asleep at level 2") == 7  # before the trainer starts, and before each of its steps
    rest = tmp_path / "rest"
    rest.mkdir()
    ended = rl(rest, settings(model, 6) | {"colocate": {}}, "--resume.dir", str(runs["turns"].run.checkpoint(5)))
    assert ended.weights(6) == runs["turns"].weights(6)
