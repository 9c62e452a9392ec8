"""A run by vime's flags with two stages of Megatron-Core learns as stretto's own trainer does; skipped without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes.add_ons import needs

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

from runs import untrained_model

from stretto.base.paths import RunDir
from stretto_megatron.backend import MADE, find_python

ON_CPU = Path(__file__).with_name("on_cpu")
SOURCE = Path(__file__).parents[3] / "src"
CODE = """
import os

def vowels(args, sample):
    text = sample.response.removesuffix("<|im_end|>")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)

def kind(it):
    return type(it).__module__.partition(".")[0] + "." + type(it).__name__

def init(args):
    say("init")

def before_log_prob(args, model, store_prefix):
    say(f"log_prob {kind(model[0])}{store_prefix}")

def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    say(f"step {rollout_id} {step_id} {kind(model[0])} {kind(optimizer)} {kind(opt_param_scheduler)}")

def say(text):
    with open(f"hooks_{os.environ['RANK']}.txt", "a") as file:
        file.write(text + "\\n")
"""
FLAGS = """
--hf-checkpoint model --prompt-data rows.jsonl --input-key prompt --apply-chat-template
--custom-rm-path own.vowels --num-rollout 12 --rollout-batch-size 4 --n-samples-per-prompt 16
--rollout-max-response-len 6 --rollout-max-context-len 64 --advantage-estimator grpo --normalize-advantages
--eps-clip 0.2 --global-batch-size 32 --lr 2e-2 --lr-decay-style constant
--actor-num-gpus-per-node 0 --rollout-num-gpus 0
"""
MEGATRON_FLAG = "--train-backend megatron"
MEGATRON = f"""
{MEGATRON_FLAG} --pipeline-model-parallel-size 2
--recompute-granularity full --recompute-method uniform --recompute-num-layers 1
--custom-megatron-init-path own.init --custom-megatron-before-log-prob-hook-path own.before_log_prob
--custom-megatron-before-train-step-hook-path own.before_train_step
"""


PPO = """
--num-rollout 5 --advantage-estimator ppo --critic-lr 1e-2 --num-critic-only-steps 1 --value-clip 0.2 --lambd 0.9
--lr 1e-2 --adam-eps 1e-4
"""
needs_another_python = pytest.mark.skipif(
    find_python() in (None, sys.executable), reason="needs Megatron-Core in a Python beside this one: make megatron"
)


def put_files(directory: Path) -> str:
    """A model and tasks, and a Python that has Megatron-Core beside it; the Python."""
    untrained_model(directory, num_layers=2)
    (directory / "own.py").write_text(CODE)
    rows = [{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in ("a", "be", "cab", "deaf")]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return environment_beside(directory / "env", find_python() or "")


def environment_beside(directory: Path, megatron: str) -> str:
    """A Python with the packages of this one, and Megatron-Core beside it where `make megatron` puts it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    packages = directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "all.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    made = directory / MADE
    made.parent.mkdir(parents=True)
    made.write_text(f'#!/bin/sh\nPYTHONPATH={ON_CPU}:{SOURCE}:. exec {megatron} "$@"\n')
    made.chmod(0o755)
    return str(directory / "bin" / "python")


def output(python: str, cwd: Path, words: list[str]) -> str:
    env = os.environ | {"PYTHONPATH": f"{SOURCE}:{cwd}", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, "-m", "stretto", *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=570
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return ran.stdout


def rewards(python: str, cwd: Path, name: str, more: str = "") -> list[float]:
    """The mean reward of each rollout of a run.

    Our own trainer packs samples as Megatron does, which shares no prefixes: so each update trains the same ones.
    """
    words = ["vime", *FLAGS.split(), *more.split(), "--save", f"runs/{name}"]
    if MEGATRON_FLAG not in more:
        (cwd / f"{name}.toml").write_text(output(python, cwd, [*words, "--print-config"]))
        words = ["rl", "@", f"{name}.toml", "--model.shared-prefixes", "off"]
    output(python, cwd, words)
    lines = RunDir(cwd / "runs" / name).metrics("orchestrator").read_text().splitlines()
    return [row["reward/mean"] for row in map(json.loads, lines) if "reward/mean" in row]


@pytest.mark.slow
@needs_another_python
def test_a_run_by_vimes_flags_with_two_stages_learns_as_the_own_trainer_does(tmp_path):
    python = put_files(tmp_path)
    found = rewards(python, tmp_path, "megatron", MEGATRON)
    own = rewards(python, tmp_path, "own")
    assert len(found) == 12 and found[:4] == pytest.approx(own[:4], abs=0.02)
    assert sum(found[-3:]) / 3 > sum(found[:3]) / 3 + 0.2
    step = "step {} {} megatron.DistributedDataParallel megatron.ChainedOptimizer megatron.OptimizerParamScheduler"
    said = ["init"]
    for rollout in range(12):
        said += ["log_prob megatron.DistributedDataParallel", step.format(rollout, 0), step.format(rollout, 1)]
    for rank in range(2):
        assert (tmp_path / f"hooks_{rank}.txt").read_text().splitlines() == said


@needs("critic")
@pytest.mark.slow
@needs_another_python
def test_the_critic_of_vimes_ppo_is_trained_by_megatron_too(tmp_path):
    python = put_files(tmp_path)
    stages = f"{MEGATRON_FLAG} --pipeline-model-parallel-size 2"
    found = rewards(python, tmp_path, "megatron", PPO + stages)
    assert found == pytest.approx(rewards(python, tmp_path, "own", PPO), abs=1e-3) and len(found) == 5
    run = RunDir(tmp_path / "runs" / "megatron")
    processes = {spec["name"] for spec in json.loads(run.plan.read_text())["processes"]}
    assert {"trainer_0", "trainer_1", "critic_0", "critic_1"} <= processes
    assert len(list((run.checkpoint(5) / "critic").glob("*"))) > 1
