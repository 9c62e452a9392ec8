"""Runs of vime's flags that start from checkpoints of Megatron's, as launch scripts do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import Ended, start, untrained_model, wait

from stretto.base.paths import RunDir
from stretto_megatron.convert import to_megatron

REWARD = """
def vowels(args, sample):
    text = sample.response.removesuffix("<|im_end|>")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def nothing(args, sample):
    return 0.0
"""
FLAGS = """
--hf-checkpoint {model} --prompt-data rows.jsonl --input-key prompt --apply-chat-template
--rollout-batch-size 4 --n-samples-per-prompt 16 --rollout-max-response-len 6 --rollout-max-context-len 64
--advantage-estimator grpo --eps-clip 0.2 --global-batch-size 32 --lr 1e-2 --lr-decay-style constant
--attention-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --use-distributed-optimizer --manual-gc
--tensor-model-parallel-size 1 --sequence-parallel --recompute-granularity full --recompute-method uniform
--recompute-num-layers 1 --actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An untrained model, whose weights are also in MEGATRON as Megatron has them."""
    model = untrained_model(tmp_path)
    to_megatron(model, tmp_path / "MEGATRON")
    (tmp_path / "own_reward.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("a", "be", "cab", "deaf")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model


def ended(words: str, cwd: Path, name: str) -> Ended:
    code, output = wait(start("vime", [*words.split(), "--save", f"runs/{name}"], cwd))
    assert code == 0, output
    return Ended(code, output, RunDir(cwd / "runs" / name))


@pytest.mark.slow
def test_a_run_from_megatrons_weights_is_that_from_the_same_weights_and_goes_on(model, tmp_path):
    learns = f"{FLAGS.format(model=model)} --custom-rm-path own_reward.vowels --save-interval 6 --save-hf x"
    plain = ended(f"{learns} --num-rollout 12", tmp_path, "plain")
    theirs = f"{learns} --ref-load MEGATRON --load runs/theirs"
    ended(f"{theirs} --num-rollout 6", tmp_path, "theirs")
    again = ended(f"{theirs} --num-rollout 12", tmp_path, "theirs")
    assert plain.weights(12) == again.weights(12)
    rewards = again.column("reward/mean")
    assert rewards == plain.column("reward/mean") and len(rewards) == 12
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert (tmp_path / "MEGATRON" / "hugging_face" / "release" / "config.json").exists()


@pytest.mark.slow
def test_a_policy_without_a_reward_learns_from_a_teacher_of_megatrons(model, tmp_path):
    learns = f"{FLAGS.format(model=model)} --custom-rm-path own_reward.vowels --num-rollout 16 --save-interval 16"
    teacher = ended(f"{learns} --normalize-advantages --save-hf x", tmp_path, "teacher")
    to_megatron(teacher.run.weights / "step_16", tmp_path / "TEACHER")
    taught = ended(
        f"{FLAGS.format(model=model)} --custom-rm-path own_reward.nothing --num-rollout 16 "
        "--use-opd --opd-type megatron --opd-teacher-load TEACHER --opd-kl-coef 1.0",
        tmp_path,
        "taught",
    )
    distances = taught.column("reference_kl/mean", "trainer")
    assert len(distances) == 16 and sum(distances[-4:]) < 0.5 * sum(distances[:4])
    assert set(taught.column("reward/mean")) == {0.0}
