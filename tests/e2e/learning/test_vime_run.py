"""A run started by vime's flags learns, and is the same run that its TOML is, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ports import free_ports
from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir

EXAMPLES = Path(__file__).parents[3] / "examples"

REWARD = '''
def vowels(args, sample):
    """The share of vowels in what was said."""
    text = sample.response.removesuffix("<|im_end|>")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
'''
FLAGS = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --apply-chat-template
--custom-rm-path own_reward.vowels
--num-rollout 16 --rollout-batch-size 4 --n-samples-per-prompt 16 --rollout-max-response-len 6
--rollout-max-context-len 64
--advantage-estimator grpo --normalize-advantages --eps-clip 0.2 --global-batch-size 32 --lr 1e-2
--lr-decay-style constant --actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""


def ended(verb: str, words: list[str], cwd: Path, run: Path) -> Ended:
    code, output = wait(start(verb, words, cwd))
    assert code == 0, output
    return Ended(code, output, RunDir(run))


PPO = """
--advantage-estimator ppo --critic-lr 1e-2 --num-critic-only-steps 2 --normalize-advantages --lambd 0.9
--critic-num-nodes 1 --critic-num-gpus-per-node 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["", PPO])
def test_flags_of_vime_train_as_the_same_toml_does_and_the_reward_rises(estimator, tmp_path):
    model = untrained_model(tmp_path)
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("a", "be", "cab", "deaf")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = FLAGS.format(model=model).split()
    if estimator:
        at = words.index("--advantage-estimator")
        words = [*words[:at], *words[at + 3 :], *estimator.split()]
    first = [*words, "--save", "runs/first", "--save-hf", "runs/first/hf"]
    by_flags = ended("vime", first, tmp_path, tmp_path / "runs" / "first")
    code, toml = wait(start("vime", [*first, "--print-config"], tmp_path))
    assert code == 0
    (tmp_path / "run.toml").write_text(toml)
    # The file has vime's ports, which other programs of this machine may have.
    control, rollouts, http = map(str, free_ports(3))
    own = ["--control.port", control, "--rollout-transport.port", rollouts, "--inference.server.port", http]
    own += ["--orchestrator.client.base-url", f"http://127.0.0.1:{http}/v1"]
    if estimator:
        own += ["--trainer.critic.placement.port", str(free_ports(1)[0])]
    second = ["@", "run.toml", "--run.name", "second", *own]
    by_toml = ended("rl", second, tmp_path, tmp_path / "runs" / "second")
    assert by_flags.weights(16) == by_toml.weights(16)
    rewards = by_flags.column("reward/mean")
    assert rewards == by_toml.column("reward/mean")
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    if not estimator:
        assert by_flags.column("optim/updates", "trainer") == [2] * 16
        return
    critics = [each.run.critic / "step_16" / "model.safetensors" for each in (by_flags, by_toml)]
    assert critics[0].read_bytes() == critics[1].read_bytes()
    assert (by_flags.run.logs / "critic.log").exists()
    assert len(by_flags.column("optim/updates", "trainer")) == 14
    variances = by_flags.column("critic/explained_variance", "trainer")
    assert len(variances) == 16 and variances[-1] > variances[0]


def test_a_frozen_model_that_generates_rewards_the_policy(tmp_path):
    model = str(untrained_model(tmp_path))
    words = ["@", str(EXAMPLES / "judge" / "rl.toml"), "--model.name", model, "--models.judge.model", model]
    small = ["--max-steps", "2", "--orchestrator.batch-size", "8", "--output-dir", str(tmp_path), "--seq-len", "64"]
    code, output = wait(start("rl", [*words, *small, "--no-view"], tmp_path))
    assert code == 0, output
    run = RunDir(tmp_path / "judge")
    rewards = Ended(code, output, run).column("reward/mean")
    assert len(rewards) == 2 and all(0 <= reward <= 1 for reward in rewards)
    assert "model_judge" in run.plan.read_text()
