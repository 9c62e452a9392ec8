"""Runs started by vime's flags learn, and are the same runs that their TOML is, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ports import free_ports
from processes.add_ons import needs
from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto_megatron.convert import to_megatron

EXAMPLES = Path(__file__).parents[3] / "examples"

REWARD = '''
def vowels(args, sample):
    """The share of vowels in what was said."""
    text = sample.response.removesuffix("<|im_end|>")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def nothing(args, sample):
    return 0.0
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


@needs("frozen")
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


OF_A_SCRIPT = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --apply-chat-template
--rollout-batch-size 4 --n-samples-per-prompt 16 --rollout-max-response-len 6 --rollout-max-context-len 64
--advantage-estimator grpo --eps-clip 0.2 --global-batch-size 32 --lr 1e-2 --lr-decay-style constant
--attention-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --use-distributed-optimizer --manual-gc
--tensor-model-parallel-size 1 --sequence-parallel --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""


def saved(words: str, cwd: Path, name: str) -> Ended:
    return ended("vime", [*words.split(), "--save", f"runs/{name}"], cwd, cwd / "runs" / name)


@pytest.fixture
def megatrons(tmp_path: Path) -> Path:
    """An untrained model, whose weights are also in MEGATRON as Megatron has them."""
    model = untrained_model(tmp_path)
    to_megatron(model, tmp_path / "MEGATRON")
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("a", "be", "cab", "deaf")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


@pytest.mark.slow
def test_a_run_from_megatrons_weights_is_that_from_the_same_weights_and_goes_on(megatrons, tmp_path):
    learns = f"{OF_A_SCRIPT.format(model=megatrons)} --custom-rm-path own_reward.vowels --save-interval 6 --save-hf x"
    plain = saved(f"{learns} --num-rollout 12", tmp_path, "plain")
    theirs = f"{learns} --ref-load MEGATRON --load runs/theirs"
    saved(f"{theirs} --num-rollout 6", tmp_path, "theirs")
    again = saved(f"{theirs} --num-rollout 12", tmp_path, "theirs")
    assert plain.weights(12) == again.weights(12)
    rewards = again.column("reward/mean")
    assert rewards == plain.column("reward/mean") and len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert (tmp_path / "MEGATRON" / "hugging_face" / "release" / "config.json").exists()


@pytest.mark.slow
def test_a_policy_without_a_reward_learns_from_a_teacher_of_megatrons(megatrons, tmp_path):
    learns = (
        f"{OF_A_SCRIPT.format(model=megatrons)} --custom-rm-path own_reward.vowels --num-rollout 16 --save-interval 16"
    )
    teacher = saved(f"{learns} --normalize-advantages --save-hf x", tmp_path, "teacher")
    to_megatron(teacher.run.weights / "step_16", tmp_path / "TEACHER")
    taught = saved(
        f"{OF_A_SCRIPT.format(model=megatrons)} --custom-rm-path own_reward.nothing --num-rollout 16 "
        "--use-opd --opd-type megatron --opd-teacher-load TEACHER --opd-kl-coef 1.0",
        tmp_path,
        "taught",
    )
    distances = taught.column("reference_kl/mean", "trainer")
    assert len(distances) == 16 and sum(distances[-4:]) < 0.5 * sum(distances[:4])
    assert set(taught.column("reward/mean")) == {0.0}
